"""Other programs as arms of scripts/bench.py: llama.cpp's own tools, and another checkout of llamaspec.

llama.cpp: each run is a process on the same files, context, threads and prompt; only the decode time that the
tool reports counts, so loading and reading the prompt are left out. Plain decoding is `llama-bench` behind as
many tokens as the prompt has; it samples nothing. Build the tools of the same llama.cpp from the source
distribution of llama-cpp-python:

    pip download --no-deps --no-binary :all: llama-cpp-python==VERSION && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B llama -DCMAKE_BUILD_TYPE=Release
    cmake --build llama --target llama-speculative-simple llama-bench llama-server    # in llama/bin

A checkout (`git worktree add ../before COMMIT`) runs in a process of its own, with the same Python and
llama.cpp, and so does this one ("now"): the same code in another process differs by a few percent. Such a
process is this file, run as a program; so importing it must not import llamaspec.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from llamaspec import Pair

DRAFT_LENGTHS = range(1, 9)  # llama.cpp's default is 3
SAMPLING = ("--top-k", "40", "--top-p", "0.95", "--min-p", "0.05")  # llamaspec's defaults
TRIES = 3  # on a busy machine its log is sometimes cut short where it ends
N_DRAFTED, N_ACCEPTED = re.compile(r"n_drafted\s*=\s*(\d+)"), re.compile(r"n_accept\s*=\s*(\d+)")
DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+) t/s")
CHECKOUT_ARMS = ("plain", "auto, kept", "auto, cold")
BEFORE, NOW = "before", "now"


class PeerRun(NamedTuple):
    """What another program did with one prompt."""

    arm: str
    n_tokens: int
    tokens_per_second: float
    acceptance_rate: float | None = None  # accepted / drafted


class LlamaCpp:
    """Runs `llama-bench` and `llama-speculative-simple` of one folder.

    Raises
    ------
    click.UsageError
        The folder lacks one of them.
    """

    def __init__(self, folder: Path, pair: Pair, threads: int | None) -> None:
        self._speculative = folder / "llama-speculative-simple"
        self._bench = folder / "llama-bench"
        for binary in (self._speculative, self._bench):
            if not binary.exists():
                raise click.UsageError(f"no {binary.name} in {folder}; build it from llama.cpp")
        self._pair = pair
        self._threads = [] if threads is None else ["-t", str(threads)]

    def turn(self, prompt: str, temperature: float, seed: int, n: int) -> Iterator[PeerRun]:
        """Plain decoding and every draft length once."""
        yield PeerRun("llama.cpp plain", n, self._plain(prompt, n))
        for k in DRAFT_LENGTHS:
            yield self._speculate(prompt, temperature, seed, n, k)

    def _plain(self, prompt: str, n: int) -> float:
        depth = len(self._pair.target.vocabulary.tokenize(prompt.encode()))
        arguments = ["-p", "0", "-n", str(n), "-d", str(depth), "-r", "1", "-o", "json"]
        command = [str(self._bench), "-m", str(self._pair.target.path), *self._threads, *arguments]
        return float(json.loads(_run(command).stdout)[0]["avg_ts"])

    def _speculate(self, prompt: str, temperature: float, seed: int, n: int, k: int) -> PeerRun:
        target = self._pair.target
        models = ["-m", str(target.path), *self._draft(), "-c", str(target.context_size)]
        text = ["-n", str(n), "--temp", str(temperature), "--seed", str(seed), *SAMPLING]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(prompt + "\n" * prompt.endswith("\n"))  # llama.cpp drops one newline at the end
            file.flush()
            command = [str(self._speculative), *models, "--spec-draft-n-max", str(k), *text]
            command += [*self._threads, "-f", file.name]
            for _ in range(TRIES):
                done = _run(command)
                log = done.stderr + done.stdout
                found = DECODED.search(log)
                if found is not None:
                    break
            else:
                raise click.ClickException(f"{self._speculative.name} gave no speed: {_last_line(done)}")
        counts = [pattern.search(log) for pattern in (N_DRAFTED, N_ACCEPTED)]
        n_drafted, n_accepted = (int(count[1]) if count else 0 for count in counts)
        rate = n_accepted / n_drafted if n_drafted else None
        return PeerRun(f"llama.cpp n_max={k}", int(found[1]), float(found[2]), rate)

    def _draft(self) -> list[str]:
        """The draft and its kind, as llama.cpp wants them named."""
        draft = self._pair.heads or self._pair.draft
        assert draft is not None
        kind = "draft-simple" if self._pair.heads is None else "draft-mtp"
        file = [] if draft.path == self._pair.target.path else ["-md", str(draft.path)]
        return [*file, "--spec-type", kind]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise click.ClickException(f"{Path(command[0]).name} failed: {_last_line(done)}")
    return done


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]


class Checkouts:
    """Two checkouts, another one and this; use as a context manager.

    Raises
    ------
    click.UsageError
        The folder has no llamaspec.
    """

    def __init__(self, folder: Path, pair: Pair) -> None:
        if not (folder / "llamaspec" / "__init__.py").exists():
            raise click.UsageError(f"{folder} has no llamaspec; name the top of a checkout")
        folders = {BEFORE: folder, NOW: Path(__file__).resolve().parents[1]}
        self._workers = {name: _start_checkout(path, pair) for name, path in folders.items()}

    def turn(self, text: str, temperature: float, seed: int, max_tokens: int) -> Iterator[PeerRun]:
        """Every arm of both once; which comes first alternates."""
        workers = [*self._workers.items()][:: 1 if seed % 2 else -1]
        for arm, (name, worker) in itertools.product(CHECKOUT_ARMS, workers):
            request = {"arm": arm, "text": text, "temperature": temperature, "seed": seed}
            assert worker.stdin is not None and worker.stdout is not None  # noqa: PT018
            print(json.dumps({**request, "max_tokens": max_tokens}), file=worker.stdin, flush=True)
            line = worker.stdout.readline()
            if not line:
                raise click.ClickException(f"the checkout {name!r} failed; its message is above")
            answer = json.loads(line)
            yield PeerRun(f"{name}: {arm}", answer["n_tokens"], answer["speed"])

    def __enter__(self) -> Checkouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.communicate()


def _start_checkout(folder: Path, pair: Pair) -> subprocess.Popen[str]:
    draft = pair.draft or pair.heads
    assert draft is not None
    named = "mtp" if draft.path == pair.target.path else draft.path.resolve()
    return subprocess.Popen(
        [sys.executable, __file__, folder.resolve(), pair.target.path.resolve(), named],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        text=True,
    )


def work(folder: str, target: str, draft: str) -> None:
    """Generate with the llamaspec of a folder, by its public API; requests and answers are lines of JSON."""
    sys.path.insert(0, folder)
    import llamaspec

    answers, sys.stdout = sys.stdout, sys.stderr
    kept = llamaspec.AutoLength()
    with llamaspec.open_pair(target, draft) as pair:
        for line in sys.stdin:
            request = json.loads(line)
            policies: dict[str, Any] = {
                "plain": llamaspec.FixedLength(0),
                "auto, kept": kept,
                "auto, cold": llamaspec.AutoLength(),
            }
            pair.forget()
            completion = pair.stream(
                request["text"],
                sampling=llamaspec.Sampling(temperature=request["temperature"]),
                seed=request["seed"],
                max_tokens=request["max_tokens"],
                policy=policies[request["arm"]],
            ).run()
            answer = {"n_tokens": len(completion.tokens), "speed": completion.summary.tokens_per_second}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    work(*sys.argv[1:4])
