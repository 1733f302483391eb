"""What a probe measured and a length policy begins with: seconds for each width."""

from __future__ import annotations

from dataclasses import dataclass

WIDEST = 1 << 16  # positions
SHORTEST, LONGEST = 1e-12, 1e6  # seconds: what lies beyond was not measured


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What one pair costs on one machine: the answer of the saturation probe.

    Raises
    ------
    ValueError
        Widths are not ascending from 1 to at most `WIDEST`, or a time is none that can be measured.
    """

    widths: tuple[int, ...]  # positions in one evaluation of the target, ascending, the first is 1
    verify_seconds: tuple[float, ...]  # one for each width
    draft_step_seconds: float  # one draft token; 0 where they cost nothing

    def __post_init__(self) -> None:
        if len(self.widths) != len(self.verify_seconds) or self.widths[:1] != (1,):
            raise ValueError("a cost curve needs one time for each width, from width 1 on")
        if any(b <= a for a, b in zip(self.widths, self.widths[1:], strict=False)):
            raise ValueError(f"widths must ascend, got {self.widths}")
        if self.widths[-1] > WIDEST:
            raise ValueError(f"widths must be <= {WIDEST}, got {self.widths[-1]}")
        times = (*self.verify_seconds, self.draft_step_seconds or LONGEST)
        if not all(SHORTEST <= seconds <= LONGEST for seconds in times):
            raise ValueError(f"seconds must be positive, from {SHORTEST:g} to {LONGEST:g}")
