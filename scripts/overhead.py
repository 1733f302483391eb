"""Measure the CPU time and the Python calls of a round outside llama.cpp, with the embedded pair.

\b
    python scripts/overhead.py --against ../before

Each evaluation of a real model reads gigabytes of weights, which evicts Python's code and data from the
processor's caches. The script writes a large array after each evaluation to the same effect. With
`--against`, another checkout takes turns with this one, each in its own process. Compare figures of one run
only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

ARMS = ("plain", "K = 4", "automatic")
TOUCHED_BYTES = 64 << 20
PROMPT = "def read(path):\n    with open(path) as file:\n"


def work(folder: str, n_tokens: int) -> None:
    """Read names of arms from stdin; print microseconds, calls and evaluations per round of each."""
    sys.path.insert(0, folder)
    import llamaspec.llama  # loads our kernels, which is too late after llama_cpp

    # isort: split
    from llama_cpp import llama_cpp as lib

    answers, sys.stdout = sys.stdout, sys.stderr
    apart = _Apart(lib.llama_decode)
    lib.llama_decode = apart
    policies: dict[str, Any] = {
        "plain": llamaspec.FixedLength(0),
        "K = 4": llamaspec.FixedLength(4),
        "automatic": llamaspec.AutoLength(),
    }
    options = llamaspec.ModelOptions(threads=1)
    target, draft = llamaspec.demo_target(), llamaspec.demo_draft()
    with llamaspec.open_pair(target, draft, target_options=options, draft_options=options) as pair:

        def measure(arm: str, *, counts: bool) -> dict[str, float]:
            apart.start(counts=counts)
            completion = pair.stream(
                PROMPT,
                sampling=llamaspec.Sampling(temperature=0.8),
                seed=1,
                max_tokens=n_tokens,
                policy=policies[arm],
            ).run()
            seconds = apart.stop()
            n = len(completion.rounds)
            return {"us": seconds / n * 1e6, "calls": apart.n_calls / n, "evaluations": apart.n / n}

        measure("plain", counts=False)  # the first completion also allocates
        for line in sys.stdin:
            arm = line.strip()
            answer = measure(arm, counts=False)
            answer["calls"] = measure(arm, counts=True)["calls"]
            print(json.dumps(answer), file=answers, flush=True)


class _Apart:
    """Replaces `llama_decode`: excludes it from the time, and evicts the caches after it, in any thread."""

    def __init__(self, decode: Callable[[Any, Any], int]) -> None:
        self._decode = decode
        self._touched = np.zeros(TOUCHED_BYTES, dtype=np.uint8)
        self._seconds = 0.0  # CPU time of evaluations and of writing the array
        self._counts = False
        self.n = self.n_calls = 0

    def __call__(self, context: Any, batch: Any) -> int:
        sys.setprofile(None)
        begin = time.thread_time()
        status = self._decode(context, batch)
        self._touched += 1
        self._seconds += time.thread_time() - begin
        self.n += 1
        sys.setprofile(self._count if self._counts else None)
        return status

    def start(self, *, counts: bool) -> None:
        self._seconds, self.n, self.n_calls, self._counts = 0.0, 0, 0, counts
        self._begin = time.process_time()
        sys.setprofile(self._count if counts else None)

    def stop(self) -> float:
        """Return the CPU seconds outside `llama_decode`."""
        sys.setprofile(None)
        self._counts = False
        return time.process_time() - self._begin - self._seconds

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.n_calls += event == "call"


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--against", type=click.Path(exists=True, path_type=Path), help="Another checkout of llamaspec."
)
@click.option("-n", "--turns", default=5, show_default=True)
@click.option("--tokens", default=150, show_default=True, help="Tokens of each completion.")
def main(against: Path | None, turns: int, tokens: int) -> None:
    """Print CPU time and Python calls per round."""
    folders = [Path(__file__).resolve().parents[1], *([against.resolve()] if against else [])]
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder in folders
    ]
    answers: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(turns):
        for arm in ARMS:
            for i, worker in enumerate(workers):
                assert worker.stdin is not None and worker.stdout is not None  # noqa: PT018
                print(arm, file=worker.stdin, flush=True)
                answers.setdefault((arm, i), []).append(json.loads(worker.stdout.readline()))
    for worker in workers:
        worker.communicate()
    for (arm, i), rounds in answers.items():
        us = min(r["us"] for r in rounds)  # other programs only add time
        calls, evaluations = (median(r[key] for r in rounds) for key in ("calls", "evaluations"))
        click.echo(
            f"{arm:9}  {us:6.0f} us  {calls:6.0f} calls  {evaluations:4.1f} evaluations a round  {folders[i]}"
        )


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].isdigit():
        work(sys.argv[1], int(sys.argv[2]))
    else:
        main()
