"""The seams: what the loop and the scheduler need from models, drafters, length policies, rules and chance.

Nothing here must be inherited: whatever has these methods fits. The fakes beside the tests show each
protocol in a few lines.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from enum import IntEnum
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from llamaspec.errors import ContextFullError
from llamaspec.values import (
    Distribution,
    Draft,
    Forward,
    ForwardRequest,
    Logits,
    Round,
    TokenArray,
    Verification,
)

Drafting: TypeAlias = Generator[ForwardRequest, Forward, Draft]  # asks for evaluations, ends with a draft
Preparing: TypeAlias = Generator[ForwardRequest, Forward, None]


class Model(Protocol):
    """Evaluates sequences; only the compute thread calls it.

    A *row* is a text that goes on, named by any integer. What the KV cache holds of a row is found again by
    comparing tokens, so nobody says "go back": a request that does not contain the rejected tokens is enough.
    """

    @property
    def vocabulary_size(self) -> int:
        """V, the number of logits for each position."""

    @property
    def context_size(self) -> int:
        """The longest sequence, in tokens."""

    @property
    def batch_size(self) -> int:
        """The most positions of one evaluation."""

    @property
    def max_scored(self) -> int:
        """The most positions of one evaluation whose logits are wanted."""

    @property
    def n_cells(self) -> int | None:
        """Tokens that all sequences together can cache; None where each has a memory of its own."""

    @property
    def max_mixed(self) -> int:
        """The most positions of one evaluation that reads a prompt beside other rows' rounds; 0 = never."""

    def prepare(self, batch: Sequence[tuple[int, ForwardRequest, int]]) -> Sequence[int | ContextFullError]:
        """Make room for requests of distinct rows; what they do not contain of the rows' texts is forgotten.

        Parameters
        ----------
        batch : sequence of (row, request, positions of padding that may come with it)

        Returns
        -------
        sequence of int or ContextFullError
            For each how many of its tokens are cached, at most those before the first whose logits are
            wanted; or why this row has no room, even without the prefixes that nobody uses.
        """

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate requests of distinct rows together; each must have been prepared.

        Returns
        -------
        list of [n_logits + K, V] float32
            Valid until the next call, and not to be written to.

        Raises
        ------
        EvaluationAbortedError
            `abort` was called from another thread. The cache is as before.
        EvaluationError
            llama.cpp failed.
        """

    def release(self, row: int) -> None:
        """The row has ended. What is cached of it may serve others, until its room is needed."""

    def forget(self) -> None:
        """Empty the KV cache, as if nothing had been evaluated."""

    def abort(self) -> None:
        """End a running evaluation soon; may be called from any thread."""


class Vocabulary(Protocol):
    """Text to tokens and back."""

    def tokenize(self, text: bytes) -> TokenArray:
        """Token ids of a text, with the special tokens that the model wants at its start."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; a part of a UTF-8 character is allowed."""

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text."""


class SpelledVocabulary(Vocabulary, Protocol):
    """What a grammar needs of a vocabulary besides."""

    @property
    def size(self) -> int:
        """V, the number of tokens."""

    @property
    def specials(self) -> Mapping[int, bytes]:
        """How the special tokens are spelled: no text is ever made of these."""

    @property
    def ends(self) -> Sequence[int]:
        """The tokens that end a text, ascending."""

    def tokenize(self, text: bytes, *, add_special: bool = True) -> TokenArray:
        """Token ids of a text, with the special tokens that the model wants at its start or without."""


class WholeVocabulary(SpelledVocabulary, Protocol):
    """What reading and writing the text of another vocabulary needs besides."""

    @property
    def bos(self) -> int:
        """The token that begins a text; -1 where there is none."""

    @property
    def eos(self) -> int:
        """The token that ends a text; -1 where there is none."""

    @property
    def adds_bos(self) -> bool:
        """Whether every text wants `bos`."""


class RowConstraint(Protocol):
    """Which tokens one text allows next: a pure function of the tokens generated so far.

    Nobody says "go back": what was generated is named with every question, and may be anything. Caches are
    welcome; state that can be wrong is not.
    """

    def allowed(self, generated: TokenArray) -> TokenArray:
        """The tokens that may come next: int32 [A], ascending.

        With the end-of-text tokens where the text may be complete, and only these where nothing else can
        go on. None behind an end-of-text token, or behind what could not be written.
        """

    def forced(self, generated: TokenArray) -> TokenArray:
        """The only tokens that can come next, as many as are known: int32 [F]."""

    def is_complete(self, generated: TokenArray) -> bool:
        """Whether the text may end here."""


class Constraint(Protocol):
    """What texts must look like: compiled once, for any number of texts and threads."""

    def start_row(self) -> RowConstraint:
        """A text begins."""


class RowLength(Protocol):
    """How many tokens are drafted for one text."""

    def wants_more(self, draft: Draft) -> bool:
        """Whether one more token than those in `draft`, by the same source, is worth its time.

        Called before every draft token.
        """

    def n_verified(self, draft: Draft) -> int:
        """How many tokens of a draft the target verifies; asked once the draft is made.

        The first of the others is a *shadow*: it costs no position, and `Round.shadow` tells whether it would
        have been accepted. Unless the rule `drops`, the answer must be settled before the first token is
        drawn: none, or all.
        """

    def width(self, n_positions: int) -> int | None:
        """How many positions to evaluate where `n_positions` are needed, by all rows together.

        More is padding, for machines where a wider batch is cheaper, or exact where a narrower one is not.
        None: no evaluation as wide as that is allowed.
        """

    def observe(self, round_: Round) -> None:
        """Learn from what a round of this text cost and gained."""

    def close(self) -> None:
        """The text has ended."""


class LengthPolicy(Protocol):
    """How many tokens are drafted: shared by all rows of a pair."""

    def start_row(self, *, drops: bool = False) -> RowLength:
        """A text begins; `drops` as in `Rule`."""


class Drafter(Protocol):
    """Whatever proposes tokens. Caches are welcome; state that can be wrong is not.

    Both methods may be plain functions, or coroutines that yield what they want evaluated.
    """

    def prepare(self, context: TokenArray) -> Preparing | None:
        """Take in a prompt ahead of the first round. Doing nothing is allowed."""

    def propose(self, context: TokenArray, length: RowLength) -> Drafting | Draft:
        """Draft what follows the whole `context`, for as long as `length` wants more.

        Fewer tokens, or none, are always allowed.
        """


@runtime_checkable
class Closing(Protocol):
    """A drafter that wants to know that the sequence has ended."""

    def close(self) -> None:
        """The sequence has ended; more than once is allowed."""


class Stream(IntEnum):
    """What a random number is for: numbers of different streams are independent."""

    TOKEN = 0  # the token at a position; shared by draft and target under the coupled rule
    DRAFT = 1  # a draft token under the rejection and block rules
    ACCEPT = 2  # whether a draft token is accepted
    RESIDUAL = 3  # the token in place of a rejected one


class RandomStreams(Protocol):
    """All chance of a text. The same (stream, position, attempt) has the same answer for the same seed.

    `attempt` tells apart draws for one position that must be independent of each other: the index at
    which the round began, or 0 where position alone decides.
    """

    def choose(self, distribution: Distribution, stream: Stream, position: int, attempt: int = 0) -> int:
        """Draw one token of `distribution`."""

    def perturbed(self, distribution: Distribution, stream: Stream, position: int) -> npt.NDArray[np.float64]:
        """What `choose` takes the greatest of: log p + noise of each token, float64 [S]."""

    def chance(self, probability: float, stream: Stream, position: int, attempt: int = 0) -> bool:
        """True with the given probability."""


class TargetDistributions(Protocol):
    """The target's distributions behind a draft, computed on demand."""

    def after(self, i: int) -> Distribution:
        """p after the context and the path to draft token `i`; -1 = after the context."""


class Rule(Protocol):
    """Decides which draft tokens are accepted, so that the text keeps the target's law."""

    @property
    def name(self) -> str:
        """The name by which users choose the rule."""

    @property
    def drops(self) -> bool:
        """Whether draft tokens may be left out of the verification for what they are, or how sure."""

    def draw(self, distribution: Distribution, streams: RandomStreams, start: int, i: int) -> int:
        """Draw draft token `i`, counted from 0, of a round whose first one stands at index `start`."""

    def verify(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> Verification:
        """Verify a draft whose first token would stand at index `start` of the whole sequence."""

    def acceptance(self, token: int, q: Distribution, p: Distribution, drawn: int) -> float:
        """How likely a token drawn from q would have been accepted, where p gave `drawn` without it."""
