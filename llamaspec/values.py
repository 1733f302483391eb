"""The values that flow between modules: frozen, validated where they are made, without behaviour.

A token sequence is always an int32 array of shape [n], never a list: a context of 32k tokens is then
copied and compared in microseconds. `None` is the only "off".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]  # [n] token ids
Logits = npt.NDArray[np.float32]  # [n, V] scores before any sampling

NO_TOKENS: TokenArray = np.empty(0, dtype=np.int32)
NO_TOKENS.flags.writeable = False


TARGET, DRAFT = "target", "draft"  # the models of a pair, as requests name them


class Source(str, Enum):
    """Who made the draft tokens."""

    MODEL = "model"  # a draft model, one token at a time
    STAGE = "stage"  # a draft model that has a draft of its own
    NGRAM = "ngram"  # copied from earlier text, at no cost
    GRAMMAR = "grammar"  # the only tokens that a constraint allows
    MTP = "mtp"  # the target's own prediction heads


@dataclass(frozen=True, slots=True, eq=False)
class ForwardRequest:
    """What a text wants evaluated: a sequence, and draft tokens behind it.

    The answer has a row of logits for each of the last `n_logits` tokens of the sequence, then one for each
    draft token. With n_logits = 0 and no draft the sequence only goes into the KV cache (prefill).

    Raises
    ------
    ValueError
        The parts do not belong together.
    """

    model: str  # TARGET, DRAFT, or a name that the scheduler knows
    tokens: TokenArray  # [n] the whole sequence
    n_logits: int = 1  # at most n
    draft: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    parents: TokenArray | None = (
        None  # [K] index of the draft token before it, -1 = the sequence; None = chain
    )

    def __post_init__(self) -> None:
        if not 0 <= self.n_logits <= len(self.tokens):
            raise ValueError(f"cannot score {self.n_logits} of {len(self.tokens)} tokens")
        if len(self.draft) and not self.n_logits:
            raise ValueError("draft tokens need the logits of the token before them")
        if self.parents is not None and len(self.parents) != len(self.draft):
            raise ValueError(f"{len(self.draft)} draft tokens have {len(self.parents)} parents")

    @property
    def n_tokens(self) -> int:
        """Positions of the KV cache that the sequence and its draft tokens fill."""
        return len(self.tokens) + len(self.draft)

    @property
    def n_scored(self) -> int:
        """Rows of logits in the answer."""
        return self.n_logits + len(self.draft)


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """The answer to a request, and the evaluation that computed it."""

    logits: Logits  # [n_logits + K, V] valid until the text makes its next request; not to be written to
    seconds: float  # of the evaluation
    n_positions: int  # in the evaluation: those of all rows, and padding
    n_rows: int  # that shared the evaluation
    n_cached: int  # tokens of the request that the KV cache held before
    evaluation: int  # serial number of the evaluation


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


@dataclass(frozen=True, slots=True)
class Logprobs:
    """How probable a token was to the model itself: of softmax(logits), before anything changes them."""

    logprob: float  # natural logarithm
    top: tuple[tuple[int, float], ...]  # the most probable (token, logprob), best first


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Draft tokens: a chain, or a tree whose first branch is what the drafter believes most.

    Raises
    ------
    ValueError
        A parent does not stand before its child, or the parts differ in length.
    """

    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    distributions: tuple[Distribution, ...] = ()  # K of them: what each was drawn from; empty where unknown
    confidences: tuple[float, ...] = ()  # K of them: the drafter's own probability of each
    source: Source = Source.MODEL
    parents: TokenArray | None = (
        None  # [K] index of the draft token before it, -1 = the context; None = chain
    )

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if len(self.confidences) != n or len(self.distributions) not in (0, n):
            raise ValueError(f"{n} draft tokens need {n} confidences, and {n} distributions or none")
        if self.parents is not None:
            if len(self.parents) != n:
                raise ValueError(f"{n} draft tokens need {n} parents, got {len(self.parents)}")
            if any(not -1 <= parent < i for i, parent in enumerate(self.parents.tolist())):
                raise ValueError("the parent of a draft token must stand before it")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def certain(cls, tokens: Sequence[int], confidence: float = 0.5, source: Source = Source.MODEL) -> Draft:
        """A chain that no randomness was needed for."""
        return cls(
            np.array(tokens, dtype=np.int32),
            tuple(Distribution.certain(token) for token in tokens),
            (confidence,) * len(tokens),
            source,
        )

    @property
    def is_chain(self) -> bool:
        """Whether every draft token follows the one before it."""
        return self.parents is None or bool((self.parents == np.arange(-1, len(self.tokens) - 1)).all())

    def parent(self, i: int) -> int:
        """Index of the draft token before draft token `i`; -1 = the context."""
        return i - 1 if self.parents is None else int(self.parents[i])

    def children(self, i: int) -> list[int]:
        """Indices of the draft tokens behind draft token `i`, or behind the context for -1."""
        if self.parents is None:
            return [i + 1] if i + 1 < len(self.tokens) else []
        children: list[int] = np.flatnonzero(self.parents == i).tolist()
        return children

    def path(self, i: int) -> list[int]:
        """Indices of the draft tokens from the context to draft token `i`, with it."""
        path: list[int] = []
        while i >= 0:
            path.append(i)
            i = self.parent(i)
        return path[::-1]

    def plus(self, token: int, distribution: Distribution, confidence: float) -> Draft:
        """The same chain with one more draft token."""
        return replace(
            self,
            tokens=np.append(self.tokens, np.int32(token)),
            distributions=(*self.distributions, distribution),
            confidences=(*self.confidences, confidence),
        )

    def first(self, n: int) -> Draft:
        """The same draft cut to its first `n` tokens."""
        if n >= len(self):
            return self
        parents = None if self.parents is None else self.parents[:n]
        return Draft(self.tokens[:n], self.distributions[:n], self.confidences[:n], self.source, parents)

    def without_distributions(self) -> Draft:
        """The same draft without its arrays of vocabulary size."""
        if not self.distributions:
            return self
        return Draft(self.tokens, (), self.confidences, self.source, self.parents)


NO_DRAFT = Draft()
NO_NGRAM_DRAFT = Draft(source=Source.NGRAM)
NO_GRAMMAR_DRAFT = Draft(source=Source.GRAMMAR)


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """What the target made of a draft: the tokens along `path` are accepted, then comes `next_token`."""

    path: tuple[int, ...]  # indices of the accepted draft tokens, each the parent of the next
    next_token: int
    distributions: tuple[Distribution, ...] = ()  # p after the context and after each accepted token


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One turn of the loop: a draft, one evaluation of the target, the tokens that it adds to the text."""

    draft: Draft  # without distributions
    path: tuple[int, ...]  # indices of the accepted draft tokens
    next_token: int  # the target's own token after the accepted ones
    width: int  # positions in the target's evaluation: those of all rows, and padding
    n_rows: int = 1  # that shared the evaluation
    evaluation: int = 0  # serial number of the evaluation: several rows may share one
    n_draft_steps: int = 0  # evaluations of draft models
    draft_seconds: float = 0.0  # these evaluations, and drawing from them; stamped by the scheduler, as all
    verify_seconds: float = 0.0  # the target's evaluation
    overhead_seconds: float = 0.0  # everything else that this row needed
    logprobs: tuple[Logprobs, ...] = ()  # of each of `tokens`, where they are wanted

    @property
    def drafted(self) -> TokenArray:
        """The draft tokens: int32 [K]."""
        return self.draft.tokens

    @property
    def confidences(self) -> tuple[float, ...]:
        """The drafter's own probability of each draft token: K of them."""
        return self.draft.confidences

    @property
    def source(self) -> Source:
        """Who made the draft tokens."""
        return self.draft.source

    @property
    def n_verified(self) -> int:
        """Draft tokens that the target evaluated: all of them."""
        return len(self.draft)

    @property
    def n_accepted(self) -> int:
        """Draft tokens that the text keeps."""
        return len(self.path)

    @property
    def tokens(self) -> TokenArray:
        """The tokens that this round adds to the text: int32 [n_accepted + 1]."""
        tokens = np.empty(len(self.path) + 1, dtype=np.int32)
        tokens[:-1] = self.draft.tokens[list(self.path)] if self.path else NO_TOKENS
        tokens[-1] = self.next_token
        return tokens

    @property
    def seconds(self) -> float:
        """Wall clock of the whole round, without what only other rows needed."""
        return self.draft_seconds + self.verify_seconds + self.overhead_seconds


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
