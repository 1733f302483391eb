"""Compares the same completions by the target alone, by the draft alone, and by both together.

`run_compare` empties the KV caches before every run, so no arm finds a prompt that another has left there.
Seconds are medians with quartiles. The speed-up compares each run with the plain run of the same turn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.completion import Completion
from llamaspec.measure.turns import Progress, Spread, TurnsInterrupted, take_turns
from llamaspec.pair import Pair
from llamaspec.protocols import Drafter, LengthPolicy
from llamaspec.sampling.filters import Sampling
from llamaspec.values import TokenArray


def first_difference(mine: Sequence[object], other: Sequence[object]) -> int | None:
    """Return the first index at which two completions differ; None if they are the same."""
    pairs = enumerate(zip_longest(mine, other))
    return next((i for i, (one, another) in pairs if one != another), None)


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Speed-up of an arm, with a prediction interval for the next measurement."""

    mean: float  # geometric, over the runs
    low: float | None = None  # None if too few runs repeat others to show the spread
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.2f}x" + ("" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})")

    @property
    def shows_nothing(self) -> bool:
        """Whether the next measurement may as well show the opposite."""
        return self.low is not None and self.high is not None and self.low < 1 < self.high

    @classmethod
    def of(cls, ratios: Sequence[float], n_cases: int = 1) -> SpeedUp:
        """Compute the speed-up from the ratios of one or more paired runs; run i is of case i % n_cases.

        The same number of further runs of the same cases has a mean in the interval with a probability of
        95 %, if the ratios of each case are log-normal with the same variance.
        """
        logs, n = [math.log(ratio) for ratio in ratios], len(ratios)
        mean = statistics.fmean(logs)
        cases = [repeats for first in range(n_cases) if (repeats := logs[first::n_cases])]
        freedom = n - len(cases)
        if freedom < 2:
            return cls(math.exp(mean))
        variance = sum(statistics.pvariance(repeats) * len(repeats) for repeats in cases) / freedom
        half = _student_t(freedom) * math.sqrt(variance * 2 / n)
        return cls(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, within 3 % from two degrees of freedom on.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = statistics.NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


# Completions


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A prompt and how to continue it."""

    prompt: TokenArray  # [n]
    sampling: Sampling
    seed: int
    max_tokens: int
    rule: str

    @property
    def repeats(self) -> bool:
        """Whether drafts must not change the completion; other rules keep only its distribution."""
        return self.rule == "coupled" or self.sampling.temperature == 0

    def run(
        self,
        pair: Pair,
        policy: LengthPolicy | None = None,
        *,
        drafter: Drafter | None = None,
        logprobs: int | None = None,
    ) -> Completion:
        """Generate with a pair and return the completion."""
        return pair.stream(
            self.prompt,
            sampling=self.sampling,
            seed=self.seed,
            max_tokens=self.max_tokens,
            rule=self.rule,
            policy=policy,
            drafter=drafter,
            logprobs=logprobs,
            scope=None,  # the arms generate the same text
        ).run()

    def run_plain(self, pair: Pair) -> Completion:
        """Generate by plain decoding and return the completion."""
        return self.run(pair, drafter=NoDrafter())


@dataclass(frozen=True, slots=True)
class Arm:
    """The measured runs of one way to generate."""

    name: str
    runs: tuple[Completion, ...]

    @property
    def seconds(self) -> list[float]:
        """Seconds of each run, without prompt processing."""
        return [run.summary.decode_seconds for run in self.runs]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each run."""
        return [run.summary.tokens_per_second or 0.0 for run in self.runs]

    @property
    def tokens_per_second(self) -> float:
        """Median over the runs."""
        return Spread.of(self.rates).median

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens divided by verified ones, over all runs; None if none was verified."""
        verified = sum(run.summary.n_verified for run in self.runs)
        return sum(run.summary.n_accepted for run in self.runs) / verified if verified else None

    @property
    def n_drafted(self) -> int:
        """Draft tokens made in all runs."""
        return sum(run.summary.n_drafted for run in self.runs)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The arms on the same prompts."""

    arms: tuple[Arm, ...]  # the target alone, the draft alone if it is a model, and both together
    same_file: bool  # target and draft are the same model
    n_cases: int = 1  # run i continues the same prompt with the same seed as run i + n_cases
    is_interrupted: bool = False  # Ctrl-C came before the last run

    @property
    def target(self) -> Arm:
        """The target alone."""
        return self.arms[0]

    @property
    def speculative(self) -> Arm:
        """The target with everything that drafts for it."""
        return self.arms[-1]

    @property
    def same_text(self) -> bool:
        """Whether every speculative run produced the target's own completion."""
        pairs = zip(self.target.runs, self.speculative.runs, strict=True)
        return all(alone.tokens == together.tokens for alone, together in pairs)

    def speed_up(self, arm: Arm) -> SpeedUp | None:
        """Return the speed-up over the target's runs in the same turns.

        None for a speculative arm that drafted nothing, because it decoded plainly, and if a run is empty.
        """
        if (arm is self.speculative and arm.n_drafted == 0) or not all((*arm.rates, *self.target.rates)):
            return None
        ratios = [its / plain for its, plain in zip(arm.rates, self.target.rates, strict=True)]
        return SpeedUp.of(ratios, self.n_cases)


def run_compare(
    pair: Pair,
    tasks: Sequence[Task],
    n_runs: int,
    policy: LengthPolicy,
    report: Progress = lambda fraction: None,
) -> Comparison:
    """Measure all arms, after one run of each that warms up.

    Runs go through the tasks, and then through the tasks with the next seed. The second half repeats the
    first, which separates differences between prompts from differences between measurements. The KV caches
    of both models are emptied. After Ctrl-C, the runs of all complete turns count, if there is one.
    """
    n_cases = (n_runs + 1) // 2

    def run(way: Callable[[Task], Completion], turn: int) -> Completion:
        pair.forget()
        n_before, which = divmod(turn % n_cases, len(tasks))
        return way(replace(tasks[which], seed=tasks[which].seed + n_before))

    def draft_alone(task: Task) -> Completion:
        prompt = task.prompt if pair.common is None else pair.common.translate(task.prompt)
        return replace(task, prompt=prompt).run_plain(alone)

    ways: dict[str, Callable[[Task], Completion]] = {"target alone": lambda task: task.run_plain(pair)}
    with ExitStack() as opened:
        if pair.draft is not None:
            alone = opened.enter_context(Pair(pair.draft))  # the model stays the pair's
            ways["draft alone"] = draft_alone
        ways["speculative"] = lambda task: task.run(pair, policy)
        is_interrupted = False
        try:
            runs = take_turns({name: partial(run, way) for name, way in ways.items()}, n_runs, report)
        except TurnsInterrupted as interrupted:
            runs, is_interrupted = interrupted.found, True
    same_file = pair.draft is not None and pair.target.path.samefile(pair.draft.path)
    arms = tuple(Arm(name, tuple(found)) for name, found in runs.items())
    return Comparison(arms, same_file, n_cases, is_interrupted)
