"""llama.cpp's own tools as arms of the benchmark: plain decoding and `llama-speculative-simple`.

Each run is a process of its own on the same files, threads and prompt; only the decode time that the tool
reports itself counts, so that loading and reading the prompt are left out.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

DRAFT_LENGTHS = range(1, 9)
DEFAULT_DRAFT_LENGTH = 3  # of llama-speculative-simple
_DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+) t/s")


class LlamaCpp:
    """Runs the binaries of one folder.

    Raises
    ------
    click.UsageError
        The folder has no `llama-speculative-simple`.
    """

    def __init__(self, folder: Path, target: Path, draft: Path, threads: int | None) -> None:
        self._binary = folder / "llama-speculative-simple"
        if not self._binary.exists():
            raise click.UsageError(f"no llama-speculative-simple in {folder}; build it from llama.cpp")
        self._command = [str(self._binary), "-m", str(target), "-md", str(draft), "-c", "4096"]
        if threads is not None:
            self._command += ["-t", str(threads), "-td", str(threads)]

    def turn(self, prompt: str, temperature: float, seed: int, n: int) -> Iterator[tuple[str, int, float]]:
        """Every draft length once: (arm, tokens, tokens per second)."""
        for k in DRAFT_LENGTHS:
            n_tokens, speed = self._run(prompt, temperature, seed, n, k)
            yield f"llama.cpp n_max={k}", n_tokens, speed

    def _run(self, prompt: str, temperature: float, seed: int, n: int, k: int) -> tuple[int, float]:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(prompt)
            file.flush()
            arguments = ["-f", file.name, "-n", str(n), "--temp", str(temperature), "--seed", str(seed)]
            arguments += ["--top-k", "40", "--top-p", "0.95", "--min-p", "0.05", "--spec-draft-n-max", str(k)]
            command = [*self._command, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        found = _DECODED.search(done.stderr + done.stdout)
        if found is None:
            raise click.ClickException(f"llama.cpp gave no speed: {done.stderr.strip().splitlines()[-1:]}")
        return int(found[1]), float(found[2])
