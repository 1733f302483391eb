"""What a length policy starts with and passes on to the next run, as values: costs, acceptance, gain."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.estimates import KEPT, Acceptance

NEAREST = 4  # minimum rounds between two explorations
RECENT = 20_000.0  # tokens of earlier runs in the gain of real requests


@dataclass(frozen=True, slots=True)
class Gain:
    """What drafts have changed in real requests: seconds of generation, and an estimate of those without."""

    n_tokens: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= each < 1e15 for each in (self.n_tokens, self.seconds, self.plain_seconds)):
            raise ValueError("the tokens and seconds of requests must be >= 0")

    @property
    def speed_up(self) -> float:
        """Speed-up over plain decoding."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0

    def plus(self, other: Gain, factor: float = 1.0) -> Gain:
        """Return the sum, with `factor` times the other."""
        return Gain(
            max(self.n_tokens + factor * other.n_tokens, 0.0),
            max(self.seconds + factor * other.seconds, 0.0),
            max(self.plain_seconds + factor * other.plain_seconds, 0.0),
        )

    def faded(self) -> Gain:
        """Return this with the weight of at most `RECENT` tokens, because requests change."""
        return Gain().plus(self, min(1.0, RECENT / max(self.n_tokens, 1.0)))


@dataclass(frozen=True, slots=True)
class LearnedPrior:
    """The knowledge that a policy starts with, from a probe or from earlier runs.

    Raises
    ------
    ValueError
        A number is not finite, or a tuple does not have the length of `Acceptance.log_odds`.
    """

    curve: CostCurve | None = None
    log_odds: tuple[float, ...] = ()  # acceptance of the draft
    distance: int = NEAREST  # rounds between two explorations
    copy_log_odds: tuple[float, ...] = ()  # acceptance of copies of earlier text
    counts: tuple[int, ...] = ()  # tokens from which each of `log_odds` was learnt, at most `KEPT`
    copy_counts: tuple[int, ...] = ()  # the same for `copy_log_odds`
    earlier_log_odds: tuple[float, ...] = ()  # acceptance of copies of earlier answers
    earlier_counts: tuple[int, ...] = ()  # the same for `earlier_log_odds`
    gain: Gain = Gain()  # since the latest benchmark

    def __post_init__(self) -> None:
        kinds = (
            (self.log_odds, self.counts, Acceptance()),
            (self.copy_log_odds, self.copy_counts, Acceptance(is_copied=True)),
            (self.earlier_log_odds, self.earlier_counts, Acceptance(is_copied=True)),
        )
        is_whole = all(
            len(log_odds) in (0, len(usual.log_odds)) and len(counts) in (0, len(log_odds))
            for log_odds, counts, usual in kinds
        )
        if not is_whole or self.distance < 1:
            raise ValueError("a prior of another kind")
        if not all(0 <= n <= KEPT for _, counts, _ in kinds for n in counts):
            raise ValueError(f"counts must be from 0 to {KEPT}")
        if not all(abs(number) < 50 for log_odds, _, _ in kinds for number in log_odds):
            raise ValueError("a prior must be finite")

    @property
    def n_learnt(self) -> int:
        """Draft tokens from which acceptance was learnt; counting stops at `KEPT`."""
        return self.counts[-1] if self.counts else 0

    def merged(self, start: LearnedPrior, kept: LearnedPrior) -> LearnedPrior:
        """Return this, with what other runs have kept meanwhile where this run has learnt nothing new.

        `start` is what this run started from, or what it has kept last.
        """
        drafts, copies, earlier = (
            _newest(*bins) for bins in zip(_bins(self), _bins(start), _bins(kept), strict=True)
        )
        return replace(
            self,
            curve=self.curve.merged(kept.curve) if self.curve and kept.curve else self.curve or kept.curve,
            log_odds=drafts[0],
            counts=drafts[1],
            copy_log_odds=copies[0],
            copy_counts=copies[1],
            earlier_log_odds=earlier[0],
            earlier_counts=earlier[1],
            gain=kept.gain.plus(self.gain.plus(start.gain, -1.0)),
            distance=kept.distance if self.distance == start.distance else self.distance,
        )


_Bin = tuple[float, int]  # log-odds, and the tokens that they were learnt from


def _bins(prior: LearnedPrior) -> list[list[_Bin]]:
    """Return the bins of drafts, of copies, and of copies of earlier answers."""
    kinds = (
        (prior.log_odds, prior.counts),
        (prior.copy_log_odds, prior.copy_counts),
        (prior.earlier_log_odds, prior.earlier_counts),
    )
    return [[*zip(log_odds, counts or (0,) * len(log_odds), strict=True)] for log_odds, counts in kinds]


def _newest(
    mine: list[_Bin], start: list[_Bin], kept: list[_Bin]
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return log-odds and counts: a bin of `kept` wherever `mine` is still as at the `start`."""
    if len(mine) == len(start) == len(kept):
        mine = [other if own == old else own for own, old, other in zip(mine, start, kept, strict=True)]
    return tuple(log_odds for log_odds, _ in mine), tuple(n for _, n in mine)
