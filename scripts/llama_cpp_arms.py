"""llama.cpp's own tools as arms of the benchmark: plain decoding and `llama-speculative-simple`.

The latter drafts with what the pair drafts with: a model, the target's own heads (MTP), or an EAGLE-3.

Each run is a process of its own on the same files, context, threads and prompt; only the decode time that
the tool reports itself counts, so that loading and reading the prompt are left out. Plain decoding is
`llama-bench` behind as many tokens as the prompt has; it samples nothing and is the fastest there is.

The binaries of the same llama.cpp, from the source distribution of llama-cpp-python:

    pip download --no-deps --no-binary :all: llama-cpp-python==VERSION && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B llama -DCMAKE_BUILD_TYPE=Release
    cmake --build llama --target llama-speculative-simple llama-bench        # they are in llama/bin
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from llamaspec import Pair
from llamaspec.llama.gguf_file import read_gguf

DRAFT_LENGTHS = range(1, 9)  # llama.cpp's default is 3
SAMPLING = ("--top-k", "40", "--top-p", "0.95", "--min-p", "0.05")  # llamaspec's defaults
TRIES = 3  # on a busy machine its log is sometimes cut short where it ends
_N_DRAFTED, _N_ACCEPTED = re.compile(r"n_drafted\s*=\s*(\d+)"), re.compile(r"n_accept\s*=\s*(\d+)")
_DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+) t/s")


TYPES = {"eagle3": "draft-eagle3", "gemma4-assistant": "draft-mtp"}  # by the draft's architecture


class PeerRun(NamedTuple):
    """What another program did with one prompt."""

    arm: str
    n_tokens: int
    tokens_per_second: float
    acceptance_rate: float | None = None  # accepted / drafted


class LlamaCpp:
    """Runs the binaries of one folder.

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
        drafts = ["--spec-draft-n-max", str(k)]
        text = ["-n", str(n), "--temp", str(temperature), "--seed", str(seed), *SAMPLING]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(prompt + "\n" * prompt.endswith("\n"))  # llama.cpp drops one newline at the end
            file.flush()
            command = [str(self._speculative), *models, *drafts, *text, *self._threads, "-f", file.name]
            for _ in range(TRIES):
                done = _run(command)
                told = done.stderr + done.stdout
                found = _DECODED.search(told)
                if found is not None:
                    break
            else:
                raise click.ClickException(f"{self._speculative.name} gave no speed: {_last_line(done)}")
        counts = [pattern.search(told) for pattern in (_N_DRAFTED, _N_ACCEPTED)]
        n_drafted, n_accepted = (int(count[1]) if count else 0 for count in counts)
        rate = n_accepted / n_drafted if n_drafted else None
        return PeerRun(f"llama.cpp n_max={k}", int(found[1]), float(found[2]), rate)

    def _draft(self) -> list[str]:
        """The draft and its kind, as llama.cpp wants them named."""
        if self._pair.heads is not None and self._pair.heads.path == self._pair.target.path:
            return ["--spec-type", "draft-mtp"]
        draft = self._pair.heads or self._pair.draft
        assert draft is not None
        architecture = read_gguf(draft.path).architecture
        return ["-md", str(draft.path), "--spec-type", TYPES.get(architecture, "draft-simple")]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise click.ClickException(f"{Path(command[0]).name} failed: {_last_line(done)}")
    return done


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or ["no word"])[-1]
