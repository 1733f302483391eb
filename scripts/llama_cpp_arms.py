"""llama.cpp's own tools as arms of the benchmark: plain decoding and `llama-speculative-simple`.

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

import click

from llamaspec import Pair

DRAFT_LENGTHS = range(1, 9)  # llama.cpp's default is 3
SAMPLING = ("--top-k", "40", "--top-p", "0.95", "--min-p", "0.05")  # llamaspec's defaults
_DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+) t/s")


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

    def turn(self, prompt: str, temperature: float, seed: int, n: int) -> Iterator[tuple[str, int, float]]:
        """Plain decoding and every draft length once: (arm, tokens, tokens per second)."""
        yield "llama.cpp plain", n, self._plain(prompt, n)
        for k in DRAFT_LENGTHS:
            n_tokens, speed = self._speculate(prompt, temperature, seed, n, k)
            yield f"llama.cpp n_max={k}", n_tokens, speed

    def _plain(self, prompt: str, n: int) -> float:
        depth = len(self._pair.target.vocabulary.tokenize(prompt.encode()))
        arguments = ["-p", "0", "-n", str(n), "-d", str(depth), "-r", "1", "-o", "json"]
        command = [str(self._bench), "-m", str(self._pair.target.path), *self._threads, *arguments]
        return float(json.loads(_run(command).stdout)[0]["avg_ts"])

    def _speculate(self, prompt: str, temperature: float, seed: int, n: int, k: int) -> tuple[int, float]:
        target, draft = self._pair.target, self._pair.draft
        assert draft is not None
        models = ["-m", str(target.path), "-md", str(draft.path), "-c", str(target.context_size)]
        drafts = ["--spec-type", "draft-simple", "--spec-draft-n-max", str(k)]
        text = ["-n", str(n), "--temp", str(temperature), "--seed", str(seed), *SAMPLING]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(prompt + "\n" * prompt.endswith("\n"))  # llama.cpp drops one newline at the end
            file.flush()
            command = [str(self._speculative), *models, *drafts, *text, *self._threads, "-f", file.name]
            done = _run(command)
        found = _DECODED.search(done.stderr + done.stdout)
        if found is None:
            raise click.ClickException(f"{self._speculative.name} gave no speed: {_last_line(done)}")
        return int(found[1]), float(found[2])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise click.ClickException(f"{Path(command[0]).name} failed: {_last_line(done)}")
    return done


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or ["no word"])[-1]
