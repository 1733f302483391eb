"""What a probe measured and a length policy begins with: seconds for each width."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What one pair costs on one machine: the answer of the saturation probe.

    Raises
    ------
    ValueError
        Widths are not ascending from 1, or a time is not positive.
    """

    widths: tuple[int, ...]  # positions in one evaluation of the target, ascending, the first is 1
    verify_seconds: tuple[float, ...]  # one for each width
    draft_step_seconds: float  # one draft token; 0 where they cost nothing

    def __post_init__(self) -> None:
        if len(self.widths) != len(self.verify_seconds) or self.widths[:1] != (1,):
            raise ValueError("a cost curve needs one time for each width, from width 1 on")
        if any(b <= a for a, b in zip(self.widths, self.widths[1:], strict=False)):
            raise ValueError(f"widths must ascend, got {self.widths}")
        if min(self.verify_seconds) <= 0 or self.draft_step_seconds < 0:
            raise ValueError("seconds must be positive")
