"""The measured costs of a pair, as a value: what a probe finds, and what runs keep for later ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

WIDEST = 1 << 16  # positions
SHORTEST, LONGEST = 1e-12, 1e6  # seconds: other times cannot have been measured
PROBED = 0.05  # standard deviation of the logarithm of a probe's timing


def credible(seconds: Iterable[float]) -> tuple[float, ...]:
    """Return the times of wider and wider batches, of which none is faster than the first.

    A batch contains the work of one position, so if it was faster, other programs held the first one up.
    """
    first, *others = seconds
    return (first, *(max(first, each) for each in others))


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Costs of one pair on one machine without cached tokens, as a probe or earlier runs have measured them.

    Raises
    ------
    ValueError
        The widths do not ascend from 1 to at most `WIDEST`, or a number cannot have been measured.
    """

    widths: tuple[int, ...]  # positions in one evaluation of the target, ascending, the first is 1
    verify_seconds: tuple[float, ...]  # one for each width
    draft_step_seconds: float  # one draft token; 0 if draft tokens cost nothing
    draft_reading_seconds: float = 0.0  # one prompt token of the draft model; 0 if unknown
    deviations: tuple[float, ...] = ()  # of the logarithm of each time, relative to width 1; () = a probe's
    attention: float = 0.0  # cost of a cached token, relative to width 1; 0 if unknown
    attention_share: float = 0.0  # of that, for each position of a sequence but the first; 0 if unknown
    draft_attention: float = 0.0  # of the draft model, relative to its step; 0 if unknown
    draft_deviation: float = PROBED  # of the logarithm of a draft step

    def __post_init__(self) -> None:
        if len(self.widths) != len(self.verify_seconds) or self.widths[:1] != (1,):
            raise ValueError("a cost curve needs one time for each width, from width 1 on")
        if any(b <= a for a, b in zip(self.widths, self.widths[1:], strict=False)):
            raise ValueError(f"widths must ascend, got {self.widths}")
        if self.widths[-1] > WIDEST:
            raise ValueError(f"widths must be <= {WIDEST}, got {self.widths[-1]}")
        times = (
            *self.verify_seconds, self.draft_step_seconds or LONGEST, self.draft_reading_seconds or LONGEST,
        )  # fmt: skip
        if not all(SHORTEST <= seconds <= LONGEST for seconds in times):
            raise ValueError(f"seconds must be positive, from {SHORTEST:g} to {LONGEST:g}")
        is_whole = len(self.deviations) in (0, len(self.widths))
        if not is_whole or not all(0 <= each < 100 for each in (*self.deviations, self.draft_deviation)):
            raise ValueError("deviations must be one for each width, from 0 to 100")
        if not all(0 <= each < 1 for each in (self.attention, self.draft_attention)):
            raise ValueError("a cached token must cost less than an evaluation")
        if not 0 <= self.attention_share <= 1:
            raise ValueError("the share of attention must be from 0 to 1")

    def at(self, depth: float) -> CostCurve:
        """Return the costs of one sequence behind this many cached tokens."""
        cached = self.verify_seconds[0] * self.attention * depth
        seconds = tuple(
            each + cached * (1 + self.attention_share * (width - 1))
            for width, each in zip(self.widths, self.verify_seconds, strict=True)
        )
        step = self.draft_step_seconds * (1 + self.draft_attention * depth)
        return replace(
            self,
            verify_seconds=seconds,
            draft_step_seconds=step,
            attention=0.0,
            attention_share=0.0,
            draft_attention=0.0,
        )

    def merged(self, other: CostCurve) -> CostCurve:
        """Return this with what is more certain in `other`, as slow or fast as the machine is here."""
        scale = self.verify_seconds[0] / other.verify_seconds[0]
        found = self._by_width()
        for width, (deviation, seconds) in other._by_width().items():
            found[width] = min(found.get(width, (deviation, scale * seconds)), (deviation, scale * seconds))
        widths = sorted(found)
        knows_less = not self.draft_step_seconds or self.draft_deviation > other.draft_deviation
        drafting, factor = (other, scale) if other.draft_step_seconds and knows_less else (self, 1.0)
        return replace(
            self,
            widths=tuple(widths),
            verify_seconds=credible(found[width][1] for width in widths),
            deviations=tuple(found[width][0] for width in widths),
            draft_step_seconds=factor * drafting.draft_step_seconds,
            draft_deviation=drafting.draft_deviation,
            draft_attention=drafting.draft_attention,
            draft_reading_seconds=self.draft_reading_seconds or scale * other.draft_reading_seconds,
        )

    def _by_width(self) -> dict[int, tuple[float, float]]:
        """Return the deviation and the seconds of each width."""
        deviations = self.deviations or (PROBED,) * len(self.widths)
        return dict(zip(self.widths, zip(deviations, self.verify_seconds, strict=True), strict=True))
