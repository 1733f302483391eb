"""The protocols between the packages: models, drafters, length policies, acceptance rules, random streams.

Nothing here must be inherited: any object with these methods fits. The fakes beside the tests show each
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
    UnusedDraft,
    Verification,
)

Drafting: TypeAlias = Generator[ForwardRequest, Forward, Draft]  # asks for evaluations, ends with a draft
Preparing: TypeAlias = Generator[ForwardRequest, Forward, None]


class Model(Protocol):
    """Evaluates sequences; only the compute thread calls it.

    A *row* is a running sequence, named by any integer. Its KV cells are found by comparing tokens: a request
    without the rejected tokens rolls them back.
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
    def prompt_chunk(self) -> int:
        """Positions of a prompt to evaluate at once while no other sequence waits."""

    @property
    def max_scored(self) -> int:
        """The most positions of one evaluation whose logits are wanted."""

    @property
    def n_cells(self) -> int | None:
        """Tokens that all sequences together can cache; None if each has a memory of its own."""

    @property
    def max_chunked_prefill(self) -> int:
        """The most positions of one evaluation with chunked prefill beside other rows' rounds; 0 = never."""

    def prepare(self, batch: Sequence[tuple[int, ForwardRequest, int]]) -> Sequence[int | ContextFullError]:
        """Make room for requests of distinct rows, each (row, request, positions of padding at most).

        What a request does not contain of its row's sequence is dropped from the cache. Returns for each how
        many of its tokens are cached, at most those before the first whose logits are wanted; or why it has
        no room, even without unused prefixes.
        """

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests of distinct rows together: a list of [n_logits + K, V] float32.

        The arrays are valid until the next call, and not to be written to.

        Raises
        ------
        EvaluationAbortedError
            `abort` was called from another thread. The cache is as before.
        EvaluationError
            llama.cpp failed.
        """

    def can_share(self, row: int) -> bool:
        """Whether other rows, and padding, may take part in the next evaluation of a prepared row."""

    def release(self, row: int) -> None:
        """Free a row that has ended or is swapped out. Its cached tokens may serve it again, and others."""

    def forget(self) -> None:
        """Empty the KV cache, as if nothing had been evaluated."""

    def abort(self) -> None:
        """Abort a running evaluation; may be called from any thread."""


class Vocabulary(Protocol):
    """Text to tokens and back."""

    def tokenize(self, text: bytes) -> TokenArray:
        """Token ids of a text, with the special tokens that the model wants at its start."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; a part of a UTF-8 character is allowed."""

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text."""


class WholeVocabulary(Vocabulary, Protocol):
    """A vocabulary with everything that grammars and heterogeneous vocabularies need."""

    @property
    def size(self) -> int:
        """V, the number of tokens."""

    @property
    def specials(self) -> Mapping[int, bytes]:
        """The names of the special tokens, which tokenizing never yields."""

    @property
    def bos(self) -> int:
        """The token that begins a text; -1 if there is none."""

    @property
    def eos(self) -> int:
        """The token that ends a text; -1 if there is none."""

    @property
    def ends(self) -> Sequence[int]:
        """All tokens that end a text, ascending."""

    @property
    def adds_bos(self) -> bool:
        """Whether every text begins with `bos`."""

    def tokenize(self, text: bytes, *, add_special: bool = True) -> TokenArray:
        """Token ids of a text, with the special tokens that the model wants at its start or without."""


def token_names(vocabulary: WholeVocabulary) -> list[bytes]:
    """[V] the text of each token, or the name of a special token behind a byte that no text holds.

    llguidance knows special tokens by this byte.
    """
    specials = vocabulary.specials
    return [
        b"\xff" + specials[token] if token in specials else vocabulary.piece(token)
        for token in range(vocabulary.size)
    ]


class SequenceConstraint(Protocol):
    """The tokens allowed next in one sequence: a pure function of the tokens generated so far."""

    def allowed(self, generated: TokenArray) -> TokenArray:
        """The tokens that may come next: int32 [A], ascending.

        With the end-of-text tokens if the text may be complete; none after an end-of-text token, or
        after tokens that were not allowed.
        """

    def forced(self, generated: TokenArray) -> TokenArray:
        """The only tokens that can come next, as many as are known: int32 [F]."""

    def is_complete(self, generated: TokenArray) -> bool:
        """Whether the text may end here."""


class Constraint(Protocol):
    """The form that texts must have: compiled once, for any number of sequences and threads."""

    def start_sequence(self) -> SequenceConstraint:
        """Start a sequence."""


class SequenceLength(Protocol):
    """Chooses how many tokens are drafted for one sequence."""

    def wants_more(self, draft: Draft) -> bool:
        """Whether one more token than those in `draft`, by the same source, is worth its time."""

    def n_verified(self, draft: Draft) -> int:
        """How many tokens of a draft the target verifies.

        `Round.counterfactual` says whether the first of the others would have been accepted. Unless the rule
        `drops`, the answer must be settled before the first token is drawn: none, or all.
        """

    def width(self, n_positions: int) -> int | None:
        """How many positions to evaluate if all sequences together need `n_positions`: more is padding.

        None if no evaluation of that width or wider is allowed.
        """

    def observe(self, round_: Round) -> None:
        """Learn from the costs and gains of a round of this sequence."""

    def close(self) -> None:
        """End the sequence."""


@runtime_checkable
class PromptReading(Protocol):
    """A sequence's length that knows costs: it also decides when a draft model reads the prompt."""

    @property
    def n_to_read(self) -> int:
        """How many tokens of the text the draft reads in this round, instead of drafting; 0: the rest."""

    @property
    def unused(self) -> UnusedDraft | None:
        """Why the draft has not read the text, if it has not."""

    def start_prompt(self, n_unread: int) -> None:
        """Start a completion whose prompt has `n_unread` tokens that the draft has not processed."""

    def observe_prompt(self, n: int, seconds: float) -> None:
        """The target has read `n` tokens of the prompt in one evaluation."""

    def observe_reading(self, n: int, seconds: float) -> None:
        """The draft has read `n` tokens of the text."""

    def plain_seconds(self, n_sequences: int) -> float | None:
        """Expected time of a round without drafts beside so many sequences; None before one was timed."""


class LengthPolicy(Protocol):
    """Chooses how many tokens are drafted: shared by all sequences of a pair."""

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> SequenceLength:
        """Start a completion of at most `max_tokens`; `drops` as in `Rule`."""


class Drafter(Protocol):
    """Proposes tokens. Both methods may be plain functions, or coroutines that yield `ForwardRequest`s."""

    def prepare(self, context: TokenArray) -> Preparing | None:
        """Read a prompt before the first round, or do nothing."""

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting | Draft:
        """Draft at most what `length` wants behind the whole `context`."""


@runtime_checkable
class Closing(Protocol):
    """A drafter with something to do when the sequence ends."""

    def close(self) -> None:
        """End the sequence. May be called more than once."""


@runtime_checkable
class Failing(Protocol):
    """A drafter that stops using its model after a failure."""

    @property
    def fault(self) -> str | None:
        """The failure of the model in this sequence."""


class Stream(IntEnum):
    """The purpose of a random number: numbers of different streams are independent."""

    TOKEN = 0  # the token at a position; shared by draft and target under the coupled rule
    DRAFT = 1  # a draft token under the rejection and block rules
    ACCEPT = 2  # whether a draft token is accepted
    RESIDUAL = 3  # the token in place of a rejected one


class RandomStreams(Protocol):
    """All chance of a sequence: a pure function of seed, stream, position and attempt.

    `attempt` separates independent draws for one position: the index at which the round began, or 0 if
    position alone decides.
    """

    def choose(self, distribution: Distribution, stream: Stream, position: int, attempt: int = 0) -> int:
        """Draw one token of `distribution`."""

    def perturbed(self, distribution: Distribution, stream: Stream, position: int) -> npt.NDArray[np.float64]:
        """Scores whose greatest `choose` takes: log p + noise of each token, float64 [S]."""

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
        """Whether the choice of the verified draft tokens may depend on the tokens drawn."""

    def draw(self, distribution: Distribution, streams: RandomStreams, start: int, i: int) -> int:
        """Draw draft token `i`, from 0, of a round whose first one has index `start` in the sequence."""

    def verify(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> Verification:
        """Verify a draft whose first token has index `start` in the whole sequence."""

    def acceptance(self, token: int, q: Distribution, p: Distribution, drawn: int) -> float:
        """The chance that a token of q would have been accepted, given that `drawn` came from p instead."""
