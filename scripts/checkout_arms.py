"""Another checkout of llamaspec as arms of the benchmark: "was it faster before?"

    git worktree add ../before COMMIT
    python scripts/bench.py --against ../before

The other checkout runs in a process of its own, on the same files, with the same Python and the same
llama.cpp, and so does this one once more ("now"), arm by arm in turns: the same code in another process, or
a minute later, differs by a few percent. Both are set against plain decoding of "now". What a probe found
here is the prior of both.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from llama_cpp_arms import PeerRun
from llamaspec import Pair
from llamaspec.length.costs import CostCurve

WORKER = Path(__file__).with_name("checkout_worker.py")
ARMS = ("plain", "auto", "auto, kept", "auto, cold")
BEFORE, NOW = "before", "now"


class Checkouts:
    """Two checkouts, another one and this; use as a context manager.

    Raises
    ------
    click.UsageError
        The folder has no llamaspec.
    """

    def __init__(self, folder: Path, pair: Pair, curve: CostCurve | None) -> None:
        folders = {BEFORE: folder, NOW: Path(__file__).resolve().parents[1]}
        self._arms = ARMS if curve is not None else tuple(arm for arm in ARMS if arm != "auto")
        self._workers = {name: _Worker(folder, pair, curve) for name, folder in folders.items()}

    def turn(self, text: str, temperature: float, seed: int, max_tokens: int) -> Iterator[PeerRun]:
        """Every arm of both once; who comes first, alternates."""
        workers = [*self._workers.items()][:: 1 if seed % 2 else -1]
        for arm, (name, worker) in itertools.product(self._arms, workers):
            answer = worker.ask(arm, text, temperature, seed, max_tokens)
            yield PeerRun(f"{name}: {arm}", len(answer["tokens"]), answer["speed"])

    def __enter__(self) -> Checkouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.close()


class _Worker:
    """Generates with the code of one folder.

    Raises
    ------
    click.UsageError
        The folder has no llamaspec.
    """

    def __init__(self, folder: Path, pair: Pair, curve: CostCurve | None) -> None:
        if not (folder / "llamaspec" / "__init__.py").exists():
            raise click.UsageError(f"{folder} has no llamaspec; name the top of a checkout")
        draft = pair.draft or pair.heads
        assert draft is not None
        named = "mtp" if draft.path == pair.target.path else draft.path.resolve()
        self._curve = [curve.widths, curve.verify_seconds, curve.draft_step_seconds] if curve else None
        self._process = subprocess.Popen(
            [sys.executable, WORKER, folder.resolve(), pair.target.path.resolve(), named],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            text=True,
        )

    def ask(self, arm: str, text: str, temperature: float, seed: int, max_tokens: int) -> dict[str, Any]:
        """Let one arm generate: its tokens, and how many in a second."""
        request = {
            "arm": arm,
            "text": text,
            "temperature": temperature,
            "seed": seed,
            "max_tokens": max_tokens,
            "curve": self._curve,
        }
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: PT018
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException("the other checkout failed; its message stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
