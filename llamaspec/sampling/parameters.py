"""What a caller says about how tokens are drawn: bias, penalties, truncation, temperature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from a model's scores, in llama.cpp's order of steps.

    Logit bias, penalties, top-k, top-p, min-p, then temperature. Temperature 0 is the most probable token,
    ties to the lowest id.

    Raises
    ------
    ValueError
        A field is outside its range.
    """

    temperature: float = 0.8  # >= 0; 0 = greedy
    top_k: int | None = 40  # keep the k best tokens
    top_p: float | None = 0.95  # keep the smallest set of best tokens with this much probability
    min_p: float | None = 0.05  # keep tokens at least this probable, relative to the best
    repeat_penalty: float | None = None  # divides (multiplies) positive (negative) scores of seen tokens
    presence_penalty: float | None = None  # subtracted once from the score of a seen token
    frequency_penalty: float | None = None  # subtracted once for each time a token was seen
    penalty_window: int | None = 64  # how many of the last tokens count as seen, those of the prompt among
    # them; None = all that were generated and none of the prompt, as OpenAI defines it
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # token -> added to its score

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top-k must be >= 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must be in (0, 1], got {self.top_p}")
        if self.min_p is not None and not 0 < self.min_p <= 1:
            raise ValueError(f"min-p must be in (0, 1], got {self.min_p}")
        if self.repeat_penalty is not None and not 0 < self.repeat_penalty < float("inf"):
            raise ValueError(f"repeat-penalty must be > 0, got {self.repeat_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if value is not None and not -float("inf") < value < float("inf"):
                raise ValueError(f"{name.replace('_', '-')} must be a finite number, got {value}")
        if self.penalty_window is not None and self.penalty_window < 1:
            raise ValueError(f"penalty window must be >= 1, got {self.penalty_window}")

        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or not -float("inf") < bias < float("inf"):
                raise ValueError(f"a logit bias must be a finite number for a token id, got {token}: {bias}")

    @property
    def penalises(self) -> bool:
        """Whether the scores depend on the tokens seen before."""
        penalties = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        return any(penalty is not None for penalty in penalties)
