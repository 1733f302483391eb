"""The values that flow between modules: frozen, validated where they are made, without behaviour.

A token sequence is always an int32 array of shape [n], never a list: a context of 32k tokens is then
copied and compared in microseconds. `None` is the only "off".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]  # [n] token ids
Logits = npt.NDArray[np.float32]  # [n, V] scores before any sampling

NO_TOKENS: TokenArray = np.empty(0, dtype=np.int32)
NO_TOKENS.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One question to a model: the scores after each of the last `n` tokens of `tokens`.

    With n = 0 the model only reads the sequence, and does nothing if it remembers it.
    `lane` names the row of the model's memory that should remember the sequence.
    """

    lane: int
    tokens: TokenArray
    n: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from a model's scores, in llama.cpp's order of steps.

    Penalties, top-k, top-p, min-p, then temperature. Temperature 0 is the most probable token, ties to
    the lowest id.

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
    penalty_window: int = 64  # how many of the last tokens count as seen

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
        if self.penalty_window < 1:
            raise ValueError(f"penalty window must be >= 1, got {self.penalty_window}")

    @property
    def penalises(self) -> bool:
        """Whether the scores depend on the tokens seen before."""
        penalties = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        return any(penalty is not None for penalty in penalties)


ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Message:
    """One contribution to a conversation.

    Raises
    ------
    ValueError
        The role is unknown.
    """

    role: str  # system, user or assistant
    text: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"a message is from {', '.join(ROLES)}, got {self.role!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Probabilities after truncation: only the tokens that survived, in ascending order of id.

    Where one token holds all the probability, drawing needs no chance.
    """

    tokens: TokenArray  # [S] int32, ascending
    probabilities: npt.NDArray[np.float64]  # [S] float64, sums to 1

    @classmethod
    def certain(cls, token: int) -> Distribution:
        """All probability on one token."""
        return cls(np.array([token], dtype=np.int32), np.ones(1))

    def probability(self, token: int) -> float:
        """Probability of one token; 0 for a token that did not survive."""
        i = int(np.searchsorted(self.tokens, token))
        if i < len(self.tokens) and self.tokens[i] == token:
            return float(self.probabilities[i])
        return 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Guesses for the tokens that come next."""

    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    distributions: tuple[Distribution, ...] = ()  # K of them: what each guess was drawn from
    confidences: tuple[float, ...] = ()  # K of them: the drafter's own probability of each guess
    is_copy: bool = False  # copied from earlier text: no model was asked, no chance was needed

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def certain(cls, tokens: Sequence[int], confidence: float = 0.5) -> Draft:
        """Guesses that no chance was needed for."""
        return cls(
            np.array(tokens, dtype=np.int32),
            tuple(Distribution.certain(token) for token in tokens),
            (confidence,) * len(tokens),
        )

    def plus(self, token: int, distribution: Distribution, confidence: float) -> Draft:
        """The same draft with one more guess."""
        return replace(
            self,
            tokens=np.append(self.tokens, np.int32(token)),
            distributions=(*self.distributions, distribution),
            confidences=(*self.confidences, confidence),
        )

    def first(self, n: int) -> Draft:
        """The same draft cut to its first `n` guesses."""
        return Draft(self.tokens[:n], self.distributions[:n], self.confidences[:n], self.is_copy)


NO_DRAFT = Draft()
NO_COPY = Draft(is_copy=True)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a draft: the first `n_accepted` guesses stand, then comes `next_token`."""

    n_accepted: int
    next_token: int


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One turn of the loop: guesses, one evaluation of the target, the tokens that stand."""

    drafted: TokenArray  # [K] the guesses
    confidences: tuple[float, ...]  # K of them
    n_verified: int  # guesses that the target evaluated
    n_accepted: int
    next_token: int  # the target's own token after the accepted guesses
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float
    is_copy: bool = False  # the guesses were copied from earlier text

    @property
    def tokens(self) -> TokenArray:
        """The tokens that this round adds to the text: int32 [n_accepted + 1]."""
        return np.append(self.drafted[: self.n_accepted], np.int32(self.next_token))

    @property
    def seconds(self) -> float:
        """Wall clock of the whole round."""
        return self.draft_seconds + self.verify_seconds + self.rest_seconds


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
    draft_step_seconds: float  # one guess of the draft; 0 when guesses cost nothing

    def __post_init__(self) -> None:
        if len(self.widths) != len(self.verify_seconds) or self.widths[:1] != (1,):
            raise ValueError("a cost curve needs one time for each width, from width 1 on")
        if any(b <= a for a, b in zip(self.widths, self.widths[1:], strict=False)):
            raise ValueError(f"widths must ascend, got {self.widths}")
        if min(self.verify_seconds) <= 0 or self.draft_step_seconds < 0:
            raise ValueError("seconds must be positive")
