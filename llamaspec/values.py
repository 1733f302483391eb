"""The values that flow between modules: frozen, and validated when they are made.

A token sequence is always an int32 array of shape [n]. `None` is the only "off".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]  # [n] token ids
Logits = npt.NDArray[np.float32]  # [n, V] scores before any sampling
Rows = npt.NDArray[np.float32]  # [n, F] hidden rows: what a model computes for a position before its logits

NO_TOKENS: TokenArray = np.empty(0, dtype=np.int32)
NO_TOKENS.flags.writeable = False


def n_common(a: TokenArray, b: TokenArray) -> int:
    """Return the length of the common beginning of two token sequences."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


# A picture is a run of ids above every vocabulary, made from a hash: the first one is at least
# FIRST_OF_PICTURE, the others lie between PICTURE and that.
PICTURE, FIRST_OF_PICTURE = 1 << 29, 1 << 30


def cuts_picture(tokens: TokenArray, n: int) -> bool:
    """Whether the first `n` tokens end inside a picture."""
    return 0 < n < len(tokens) and bool(PICTURE <= tokens[n] < FIRST_OF_PICTURE)


def before_picture(tokens: TokenArray, n: int) -> int:
    """Return `n`, or the start of the picture that the first `n` tokens would cut."""
    while cuts_picture(tokens, n):
        n -= 1
    return n


def without_pictures(tokens: TokenArray) -> TokenArray:
    """Return the tokens of the text."""
    return tokens[tokens < PICTURE] if len(tokens) and int(tokens.max()) >= PICTURE else tokens


Scope = bytes  # [16] whose sequence it is: cached tokens serve only requests of the same scope
EVERYONE = "*"  # name of the scope whose cached tokens serve requests of all scopes


def scope_of(name: str | None) -> Scope:
    """Return the scope of a name: a hash, because the name may contain an API key."""
    if not name:
        return NO_SCOPE
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=len(NO_SCOPE)).digest()


def serves(owner: Scope, scope: Scope) -> bool:
    """Whether the cached tokens of the scope `owner` serve requests of another scope."""
    return owner in (scope, _OF_EVERYONE)


NO_SCOPE: Scope = bytes(16)  # the default
_OF_EVERYONE = scope_of(EVERYONE)

TARGET, DRAFT = "target", "draft"  # names of a pair's models in requests
MTP = "mtp"  # name of the target's own prediction heads in requests


class Source(str, Enum):
    """Where draft tokens come from."""

    MODEL = "model"  # a draft model, one token at a time
    NGRAM = "ngram"  # copied from earlier in the same sequence, at no cost
    PREDICTION = "prediction"  # copied from the text that the caller expects, at no cost
    EARLIER = "earlier"  # copied from the answer to an earlier prompt, at no cost
    GRAMMAR = "grammar"  # the only token that a constraint allows
    MTP = "mtp"  # the target's own prediction heads
    EAGLE3 = "eagle3"  # a draft that reads the target's hidden rows, one token at a time
    BLOCK = "block"  # a draft that reads the target's hidden rows, several tokens at once


class Copying(str, Enum):
    """Whether draft tokens are copied from earlier text."""

    OFF = "off"
    ON = "on"
    WEIGHED = "weighed"  # on, but beside a draft model only if the length policy compares the two

    @classmethod
    def of(cls, wanted: bool | None) -> Copying:
        """Return the value for an option that may be left out."""
        return cls.WEIGHED if wanted is None else cls.ON if wanted else cls.OFF


COPIES = frozenset({Source.NGRAM, Source.PREDICTION, Source.EARLIER})
LONGEST_COPY = 511  # tokens; with the one before them they fill a physical batch of llama.cpp
CHUNK = (
    64  # positions of a sequence that an evaluation may always have; attention on CPUs computes 64 at once
)
WAIT_SECONDS = 0.5  # how long a larger chunk may keep other sequences waiting


class HiddenRows(NamedTuple):
    """Hidden rows of consecutive positions of a sequence."""

    start: int  # position of the first row
    rows: Rows  # [n, F]

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + len(self.rows)

    def part(self, start: int, end: int) -> Rows:
        """Return the rows of some positions, all of them known: a view [end - start, F]."""
        assert self.start <= start <= end <= self.end
        return self.rows[start - self.start : end - self.start]


class HiddenInput(NamedTuple):
    """The hidden rows that a draft model reads besides the tokens of a request."""

    begin: int  # the first token that the draft model sees
    target: HiddenRows  # of the last positions that the target has evaluated
    own: Rows  # [k, E] the draft model's own, before each of the last k tokens, which it has drafted

    def prefill(self, n_left_out: int) -> HiddenInput:
        """Return the input without the last tokens of the request."""
        return self._replace(own=self.own[: max(0, len(self.own) - n_left_out)])


@dataclass(frozen=True, slots=True, eq=False)
class ForwardRequest:
    """A sequence to evaluate, followed by draft tokens.

    The answer has logits for the last `n_logits` tokens of the sequence, then for each draft token. With
    n_logits = 0 it is a prefill.
    """

    model: str  # TARGET, DRAFT, or a name that the scheduler knows
    tokens: TokenArray  # [n] the whole sequence
    n_logits: int = 1  # at most n
    draft: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    rows_from: int | None = None  # the answer has the target's hidden rows from this position on; None = none
    hidden: HiddenInput | None = None  # for a draft model that reads hidden rows
    scope: Scope = NO_SCOPE  # the scheduler replaces it by that of the sequence
    likely_only: bool = False  # the logits of unlikely tokens may be -inf
    whole: TokenArray | None = None  # [m] the sequence that this is the beginning of, if that is known
    n_before: int = field(init=False)  # tokens before the first with logits
    n_reusable: int = field(init=False)  # of these, tokens that need not be evaluated if they are cached
    n_tokens: int = field(init=False)  # positions that the sequence and its draft fill in the KV cache
    n_scored: int = field(init=False)  # positions with logits in the answer

    def __post_init__(self) -> None:
        n, n_draft = len(self.tokens), len(self.draft)
        if not 0 <= self.n_logits <= n:
            raise ValueError(f"cannot score {self.n_logits} of {n} tokens")
        if n_draft and not self.n_logits:
            raise ValueError("draft tokens need the logits of the token before them")
        n_before = n - self.n_logits
        object.__setattr__(self, "n_before", n_before)
        n_reusable = n_before if self.rows_from is None else min(n_before, self.rows_from)
        object.__setattr__(self, "n_reusable", n_reusable)
        object.__setattr__(self, "n_tokens", n + n_draft)
        object.__setattr__(self, "n_scored", self.n_logits + n_draft)

    @property
    def reusable(self) -> TokenArray:
        """The tokens, of the whole sequence, that need not be evaluated if they are cached."""
        if self.whole is None:
            return self.tokens[: self.n_reusable]
        n = len(self.whole) - 1  # the last one will be scored
        return self.whole[: n if self.rows_from is None else min(n, self.rows_from)]

    def prefill(self, n: int) -> ForwardRequest:
        """Return a request for the first `n` tokens, without logits; a picture at its end is whole."""
        while cuts_picture(self.tokens, n):
            n += 1
        hidden = None if self.hidden is None else self.hidden.prefill(len(self.tokens) - n)
        return ForwardRequest(
            self.model,
            self.tokens[:n],
            0,
            rows_from=self.rows_from,
            hidden=hidden,
            scope=self.scope,
            whole=self.tokens if self.whole is None else self.whole,
        )


class Attention(NamedTuple):
    """How many cached tokens the positions of an evaluation attend to, added up over its sequences."""

    first: float = 0.0  # the first position of each sequence
    others: float = 0.0  # all other positions

    def plus(self, depth: float, n: int) -> Attention:
        """Add a sequence whose `n` positions attend to `depth` cached tokens, on average."""
        return Attention(self.first + depth, self.others + (n - 1) * depth)


NO_ATTENTION = Attention()  # nothing is cached


class Evaluation(NamedTuple):
    """A call of llama.cpp, which several sequences may share."""

    width: int  # positions of all sequences, with padding
    n_sequences: int = 1  # that have a round in it; 1 for a prompt chunk alone
    serial: int = 0  # number of the evaluation
    n_prefill: int = 0  # positions of that prompt chunk, whose share of the seconds is not counted
    attention: Attention = NO_ATTENTION  # of all sequences
    is_disturbed: bool = False  # other programs took cores, so its seconds tell little about others


class Forward(NamedTuple):
    """The answer to a request."""

    logits: Logits  # [n_logits + K, V] read-only, valid until the next request of the sequence
    seconds: float  # of all evaluations for this request
    n_cached: int  # tokens of the request that the KV cache held before
    evaluation: Evaluation  # the last one; width 0 if everything was cached
    # The target's rows from `rows_from` on, or a draft model's own rows of scored positions; valid as long.
    hidden: HiddenRows | None = None


class Logprobs(NamedTuple):
    """Log-probabilities of softmax(logits), before temperature, truncation and penalties."""

    logprob: float  # natural logarithm
    top: tuple[tuple[int, float], ...]  # the most probable (token, logprob), best first


class Distribution(NamedTuple):
    """Probabilities after truncation: only the tokens that survived."""

    tokens: TokenArray  # [S] int32, ascending
    probabilities: npt.NDArray[np.float64]  # [S] float64, sums to 1

    @classmethod
    def certain(cls, token: int) -> Distribution:
        """Put all probability on one token."""
        return cls(np.array([token], dtype=np.int32), np.ones(1))

    def probability(self, token: int) -> float:
        """Return the probability of one token; 0 for a token that did not survive."""
        i = int(np.searchsorted(self.tokens, token))
        if i < len(self.tokens) and self.tokens[i] == token:
            return float(self.probabilities[i])
        return 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Draft tokens, each after the one before it."""

    tokens: TokenArray = field(default_factory=lambda: NO_TOKENS)  # [K]
    distributions: tuple[Distribution, ...] = ()  # K of them, from which each was drawn; empty if unknown
    confidences: tuple[float, ...] = ()  # K of them: the drafter's own probability of each
    source: Source = Source.MODEL
    ahead: tuple[float, ...] = ()  # confidences of more tokens that would cost nothing; empty if unknown

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if len(self.confidences) != n or len(self.distributions) not in (0, n):
            raise ValueError(f"{n} draft tokens need {n} confidences, and {n} distributions or none")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def certain(cls, tokens: Sequence[int], confidence: float = 0.5, source: Source = Source.MODEL) -> Draft:
        """Make a draft of tokens that were not drawn at random."""
        return cls(
            np.array(tokens, dtype=np.int32),
            tuple(Distribution.certain(token) for token in tokens),
            (confidence,) * len(tokens),
            source,
        )

    def plus(self, token: int, distribution: Distribution | None = None, confidence: float = 1.0) -> Draft:
        """Return the draft with one more token, the only possible one if it has no distribution."""
        return Draft(
            np.concatenate((self.tokens, np.array((token,), dtype=np.int32))),
            (*self.distributions, distribution or Distribution.certain(token)),
            (*self.confidences, confidence),
            self.source,
            self.ahead[1:],
        )

    def first(self, n: int) -> Draft:
        """Return the first `n` tokens."""
        if n >= len(self):
            return self
        return Draft(self.tokens[:n], self.distributions[:n], self.confidences[:n], self.source)

    def without_distributions(self) -> Draft:
        """Return the draft without arrays of vocabulary size."""
        if not self.distributions:
            return self
        return Draft(self.tokens, (), self.confidences, self.source)


NO_DRAFT = Draft()


class Verification(NamedTuple):
    """The result of a rule: the first `n_accepted` draft tokens are accepted, and `next_token` follows."""

    n_accepted: int
    next_token: int


class UnusedDraft(NamedTuple):
    """Why a draft model was not used: processing the prompt would have cost more time than drafts save."""

    reading_seconds: float
    saved_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A draft, one evaluation of the target, and the tokens that it adds to the sequence."""

    draft: Draft  # the part that the target evaluated; without distributions
    n_accepted: int  # number of accepted draft tokens, the first ones
    next_token: int  # the target's own token after the accepted ones
    verified_in: Evaluation  # the target's evaluation
    n_draft_steps: int = 0  # evaluations of draft models
    draft_seconds: float = 0.0  # of these evaluations; the scheduler fills in all seconds
    verify_seconds: float = 0.0  # of the target's evaluation
    overhead_seconds: float = 0.0  # of everything else
    stalled_seconds: float = 0.0  # of drafting and verifying, while the machine stood still, for the policy
    logprobs: tuple[Logprobs, ...] = ()  # of each of `tokens`, if requested
    n_dropped: int = 0  # tokens that were drafted but not verified
    counterfactual: tuple[float, float] | None = None  # confidence and acceptance of the first of them
    plain_seconds: float | None = None  # expected without a draft, beside as many sequences

    @property
    def width(self) -> int:
        """Positions in the target's evaluation, of all sequences, with padding."""
        return self.verified_in.width

    @property
    def n_sequences(self) -> int:
        """Number of sequences that shared the target's evaluation."""
        return self.verified_in.n_sequences

    @property
    def evaluation(self) -> int:
        """Serial number of the target's evaluation, the same for all sequences that shared it."""
        return self.verified_in.serial

    @property
    def n_drafted(self) -> int:
        """Number of draft tokens, including those that the target did not evaluate."""
        return len(self.draft) + self.n_dropped

    @property
    def confidences(self) -> tuple[float, ...]:
        """The drafter's own probability of each draft token: K of them."""
        return self.draft.confidences

    @property
    def source(self) -> Source:
        """The origin of the draft tokens."""
        return self.draft.source

    @property
    def n_verified(self) -> int:
        """Number of draft tokens that the target evaluated."""
        return len(self.draft)

    @property
    def n_priced_steps(self) -> int:
        """Number of draft steps; several that make one draft token together count as one."""
        return min(self.n_draft_steps, max(self.n_drafted, 1))

    @property
    def tokens(self) -> TokenArray:
        """The tokens that the round adds to the sequence: int32 [n_accepted + 1]."""
        accepted = self.draft.tokens[: self.n_accepted].tolist()
        return np.array((*accepted, self.next_token), dtype=np.int32)

    @property
    def seconds(self) -> float:
        """Seconds of the whole round, without the share that only other sequences needed."""
        return self.draft_seconds + self.verify_seconds + self.overhead_seconds
