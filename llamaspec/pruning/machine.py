"""What a target and its drafts cost on this machine: everything of the search that takes times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import DRAFT_SCORED, ModelOptions
from llamaspec.measure.compare import Spread
from llamaspec.measure.probe import QUICK, Effort, measure
from llamaspec.measure.reasons import round_seconds
from llamaspec.measure.task import Task
from llamaspec.pair import Pair

STEPS = Effort(widths=(1,), depths=(64,), most_turns=7, seconds=10.0, n_compared=1)
N_RUNS = 2  # of each text, for a speed-up


class Machine(Protocol):
    """What things cost; tests have one without a clock."""

    def round_seconds(self, target: LlamaModel) -> list[float]:
        """[K] the target's share of a round with K draft tokens."""

    def step_ratio(self, target: LlamaModel, draft: LlamaModel) -> float:
        """Seconds of a draft step next to one token of the target."""

    def speed_up(self, target: LlamaModel, draft_file: Path, tasks: Sequence[Task]) -> Spread:
        """Tokens per second with a draft next to plain decoding."""


class ThisMachine:
    """Measures."""

    def round_seconds(self, target: LlamaModel) -> list[float]:
        """[K] the target's share of a round with K draft tokens."""
        return round_seconds(measure(Pair(target, None, 0.0), QUICK).curve)

    def step_ratio(self, target: LlamaModel, draft: LlamaModel) -> float:
        """Both in turns; the low quartiles, because the rest is what other programs took."""
        found = measure(Pair(target, draft, 0.0), STEPS)
        assert found.draft_step is not None
        return found.draft_step.low / found.widths[0].timings[0].low

    def speed_up(self, target: LlamaModel, draft_file: Path, tasks: Sequence[Task]) -> Spread:
        """Both in turns, each text several times; the automatic length learns first."""
        ratios = []
        with LlamaModel(draft_file, draft_options(target)) as draft:
            pair = Pair(target, draft, 0.0)
            for run in range(N_RUNS + 1):  # the first one warms up
                for task in tasks:
                    pair.forget()
                    plain = task.run_plain(pair).summary.tokens_per_second
                    pair.forget()
                    drafted = task.run(pair).summary.tokens_per_second
                    if run and plain and drafted:
                        ratios.append(drafted / plain)
        return Spread.of(ratios)


def draft_options(target: LlamaModel) -> ModelOptions:
    """A draft is loaded as its target is."""
    return ModelOptions(
        n_ctx=target.options.n_ctx,
        gpu_layers=target.options.gpu_layers,
        threads=target.options.threads,
        max_scored=DRAFT_SCORED,
    )
