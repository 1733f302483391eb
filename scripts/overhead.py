"""What llamaspec itself costs: CPU time and Python calls of a round, and the hand-over of a token.

\b
    python scripts/overhead.py --against ../before

A round: with the embedded pair. A real model streams gigabytes through the caches of the processor in every
evaluation, and Python finds nothing of its own there afterwards; so here an array is written after each.
Another checkout takes turns with this one, each in a process of its own. CPU time of the process without
llama.cpp's, so a busy machine disturbs little; compare columns of one run only.

The hand-over: a `TextStream` over the compute thread against one whose reader steps the scheduler itself,
with a model whose evaluations only sleep. The difference, for each token, of the seconds outside evaluations:
median of pairs of texts. It needs an idle machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

ARMS = ("plain", "K = 4", "automatic")
TOUCHED_BYTES = 64 << 20
PROMPT = "def read(path):\n    with open(path) as file:\n"
VOCABULARY_SIZE, SLEEP_SECONDS = 32, 2e-4  # of the model that only sleeps


def work(folder: str, n_tokens: int) -> None:
    """Answer arms on stdin with microseconds, calls, and evaluations, of one round."""
    sys.path.insert(0, folder)
    from llama_cpp import llama_cpp as lib

    import llamaspec

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

        measure("plain", counts=False)  # the first text also allocates
        for line in sys.stdin:
            arm = line.strip()
            answer = measure(arm, counts=False)
            answer["calls"] = measure(arm, counts=True)["calls"]
            print(json.dumps(answer), file=answers, flush=True)


class _Apart:
    """`llama_decode`, its CPU time apart, and empty caches behind it; whichever thread calls it."""

    def __init__(self, decode: Callable[[Any, Any], int]) -> None:
        self._decode = decode
        self._touched = np.zeros(TOUCHED_BYTES, dtype=np.uint8)
        self._seconds = 0.0  # in here
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
        """CPU seconds outside."""
        sys.setprofile(None)
        self._counts = False
        return time.process_time() - self._begin - self._seconds

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.n_calls += event == "call"


def hand_over_seconds(n_pairs: int, n_tokens: int) -> float:
    """How much longer a token takes through the compute thread than with the reader's own steps."""
    from llamaspec.engine.scheduler import Scheduler
    from llamaspec.engine.thread import ComputeThread
    from llamaspec.values import TARGET

    class Stepped(ComputeThread):
        """Steps where it is called."""

        def __init__(self, scheduler: Scheduler) -> None:
            super().__init__(scheduler)
            self._own = scheduler

        def next_event(self, sequence: Any) -> Any:
            while sequence.events.empty() and not sequence.is_done:
                self._own.step()
            return super().next_event(sequence)

        def _post(self, do: Callable[[], object], refuse: Callable[[], object]) -> None:
            do()

    model = _Sleeping(n_tokens + 8)
    threads: list[ComputeThread] = [kind(Scheduler({TARGET: model})) for kind in (ComputeThread, Stepped)]
    differences = []
    for i in range(n_pairs):
        seconds = [0.0, 0.0]
        for j in (i % 2, 1 - i % 2):
            model.seconds = 0.0
            seconds[j] = _text_seconds(threads[j], n_tokens) - model.seconds
        differences.append((seconds[0] - seconds[1]) / n_tokens)
    for thread in threads:
        thread.close()
    return median(differences[1:])  # the first starts the thread


def _text_seconds(thread: Any, n_tokens: int) -> float:
    """Seconds of a text of plain decoding."""
    from llamaspec import FixedLength, NoDrafter, Sampling
    from llamaspec.engine.generation import GenerationRequest
    from llamaspec.engine.speculate import Speculation
    from llamaspec.engine.stream import TextStream
    from llamaspec.sampling.acceptance_rules import RULES
    from llamaspec.sampling.random_streams import SeededStreams

    speculation = Speculation(
        drafter=NoDrafter(),
        length=FixedLength(0).start_sequence(),
        rule=RULES["coupled"],
        sampling=Sampling(temperature=0.0),
        streams=SeededStreams(0),
        context_size=n_tokens + 8,
    )
    stream = TextStream(GenerationRequest(np.zeros(1, np.int32), _Letters(), speculation, n_tokens), thread)
    begin = time.perf_counter()
    for _ in stream:
        pass
    return time.perf_counter() - begin


class _Letters:
    """Token n is a letter; none ends a text."""

    def tokenize(self, text: bytes) -> Any:
        raise NotImplementedError

    def piece(self, token: int) -> bytes:
        return bytes([65 + token])

    def is_end(self, token: int) -> bool:
        return False


class _Sleeping:
    """A model whose evaluations sleep, as llama.cpp without the interpreter's lock; it caches every token."""

    vocabulary_size, n_cells, max_chunked_prefill = VOCABULARY_SIZE, None, 0
    batch_size = prompt_chunk = max_scored = 512

    def __init__(self, context_size: int) -> None:
        self.context_size = context_size
        self.seconds = 0.0  # of all evaluations
        self._logits = np.eye(1, VOCABULARY_SIZE, 3, dtype=np.float32)

    def can_share(self, row: int) -> bool:
        return True

    def prepare(self, batch: Sequence[tuple[int, Any, int]]) -> list[int]:
        return [max(0, len(request.tokens) - 1) for _, request, _ in batch]

    def evaluate(self, batch: Sequence[tuple[int, Any]], n_padding: int = 0) -> list[Any]:
        begin = time.perf_counter()
        time.sleep(SLEEP_SECONDS)
        self.seconds += time.perf_counter() - begin
        return [np.repeat(self._logits, request.n_scored, axis=0) for _, request in batch]

    def release(self, row: int) -> None:
        """Nothing is kept."""

    def forget(self) -> None:
        """Nothing is kept."""

    def abort(self) -> None:
        """It ends soon."""


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--against", type=click.Path(exists=True, path_type=Path), help="Another checkout.")
@click.option("-n", "--turns", default=5, show_default=True)
@click.option("--tokens", default=150, show_default=True, help="Of each text.")
def main(against: Path | None, turns: int, tokens: int) -> None:
    """CPU time and Python calls of llamaspec in each round, and its hand-over from thread to thread."""
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
        us = min(r["us"] for r in rounds)  # what disturbs only adds
        calls, evaluations = (median(r[key] for r in rounds) for key in ("calls", "evaluations"))
        click.echo(
            f"{arm:9}  {us:6.0f} us  {calls:6.0f} calls  {evaluations:4.1f} evaluations a round  {folders[i]}"
        )
    click.echo(f"hand-over per token: {hand_over_seconds(4 * turns + 1, 4 * tokens) * 1e6:.0f} µs")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].isdigit():
        work(sys.argv[1], int(sys.argv[2]))
    else:
        main()
