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

    A *row* is a running sequence, named by any integer. Its KV cells are found by comparing tokens, so a
    request without the rejected tokens rolls them back.
    """

    @property
    def vocabulary_size(self) -> int:
        """V, the number of logits for each position."""

    @property
    def context_size(self) -> int:
        """The longest sequence, in tokens."""

    @property
    def batch_size(self) -> int:
        """Maximum number of positions in one evaluation."""

    @property
    def prompt_chunk(self) -> int:
        """Prompt positions to evaluate at once if no other sequence waits."""

    @property
    def max_scored(self) -> int:
        """Maximum number of positions in one evaluation that have logits."""

    @property
    def n_cells(self) -> int | None:
        """Number of tokens that all sequences share in the KV cache; None if each has its own memory."""

    @property
    def max_chunked_prefill(self) -> int:
        """Maximum width of an evaluation with a prompt chunk beside other rows' rounds; 0 = never."""

    def prepare(self, batch: Sequence[tuple[int, ForwardRequest, int]]) -> Sequence[int | ContextFullError]:
        """Make room for requests of distinct rows, each (row, request, positions of padding at most).

        Cached tokens of a row that its request does not contain are dropped. Returns for each request how
        many of its tokens are cached, at most those before the first with logits; or the error if it has no
        room, even after unused prefixes were dropped.
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
        """The bytes of a token, possibly a part of a UTF-8 character."""

    def is_end(self, token: int) -> bool:
        """Whether a token ends the completion."""


class WholeVocabulary(Vocabulary, Protocol):
    """A vocabulary with everything that grammars and heterogeneous vocabularies need."""

    @property
    def size(self) -> int:
        """V, the number of tokens."""

    @property
    def specials(self) -> Mapping[int, bytes]:
        """Names of the special tokens; `tokenize` never returns these tokens."""

    @property
    def bos(self) -> int:
        """The beginning-of-text token; -1 if there is none."""

    @property
    def eos(self) -> int:
        """The end-of-text token; -1 if there is none."""

    @property
    def ends(self) -> Sequence[int]:
        """All end-of-text tokens, ascending."""

    @property
    def adds_bos(self) -> bool:
        """Whether every sequence begins with `bos`."""

    def tokenize(self, text: bytes, *, add_special: bool = True) -> TokenArray:
        """Token ids of a text; `add_special` adds the special tokens that the model wants at its start."""


def token_names(vocabulary: WholeVocabulary) -> list[bytes]:
    """[V] the bytes of each token; for a special token its name, after a byte that UTF-8 never contains.

    By this byte llguidance recognises special tokens.
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

        Includes the end-of-text tokens if the completion may end here. Empty after an end-of-text token, or
        after tokens that were not allowed.
        """

    def forced(self, generated: TokenArray) -> TokenArray:
        """The tokens that must come next, as far as they are known: int32 [F]."""

    def is_complete(self, generated: TokenArray) -> bool:
        """Whether the completion may end here."""


class Constraint(Protocol):
    """Restricts completions; compiled once, for any number of sequences and threads."""

    def start_sequence(self) -> SequenceConstraint:
        """Start a sequence."""


class SequenceLength(Protocol):
    """Chooses how many tokens are drafted for one sequence."""

    def wants_more(self, draft: Draft) -> bool:
        """Whether one more token than those in `draft`, from the same source, is worth its time."""

    def n_verified(self, draft: Draft) -> int:
        """How many tokens of a draft the target verifies.

        `Round.counterfactual` says whether the first of the others would have been accepted. Unless the rule
        `drops`, the answer must be settled before the first token is drawn: none, or all.
        """

    def width(self, n_positions: int) -> int | None:
        """The width of an evaluation in which all sequences together need `n_positions`; the rest is padding.

        None if no evaluation of that width or wider is allowed.
        """

    def observe(self, round_: Round) -> None:
        """Learn from the costs and gains of a round of this sequence."""

    def close(self) -> None:
        """End the sequence."""


@runtime_checkable
class PromptReading(Protocol):
    """A `SequenceLength` that also decides when the draft model processes the prompt."""

    @property
    def n_to_read(self) -> int:
        """Prompt tokens that the draft model processes in this round instead of drafting; 0 = the rest."""

    @property
    def unused(self) -> UnusedDraft | None:
        """Why the draft model has not processed the prompt; None if it has."""

    def start_prompt(self, n_unread: int) -> None:
        """Start a completion whose prompt has `n_unread` tokens that the draft has not processed."""

    def observe_prompt(self, n: int, seconds: float) -> None:
        """Learn from `n` prompt tokens that the target processed in one evaluation."""

    def observe_reading(self, n: int, seconds: float) -> None:
        """Learn from `n` tokens that the draft model processed."""

    def plain_seconds(self, n_sequences: int) -> float | None:
        """Expected seconds of a round of `n_sequences` without drafts; None before one was timed."""


class LengthPolicy(Protocol):
    """Chooses how many tokens are drafted; shared by all sequences of a pair."""

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> SequenceLength:
        """Start a completion of at most `max_tokens`; `drops` as in `Rule`."""


class Drafter(Protocol):
    """Proposes tokens. Both methods may be plain functions, or coroutines that yield `ForwardRequest`s."""

    def prepare(self, context: TokenArray) -> Preparing | None:
        """Process the prompt before the first round, or do nothing."""

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting | Draft:
        """Draft tokens that follow the whole `context`, no more than `length` wants."""


@runtime_checkable
class Closing(Protocol):
    """A drafter that needs to know when the sequence ends."""

    def close(self) -> None:
        """End the sequence. May be called more than once."""


@runtime_checkable
class Failing(Protocol):
    """A drafter that stops using its model after a failure."""

    @property
    def fault(self) -> str | None:
        """The error that stopped the model in this sequence."""


class Stream(IntEnum):
    """The purpose of a random number: numbers of different streams are independent."""

    TOKEN = 0  # the token at a position; shared by draft and target under the coupled rule
    DRAFT = 1  # a draft token under the rejection and block rules
    ACCEPT = 2  # whether a draft token is accepted
    RESIDUAL = 3  # the token in place of a rejected one


class RandomStreams(Protocol):
    """All randomness of a sequence: a pure function of seed, stream, position and attempt.

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
    """Decides which draft tokens are accepted, so that the completion keeps the target's law."""

    @property
    def name(self) -> str:
        """The name by which users choose the rule."""

    @property
    def drops(self) -> bool:
        """Whether the tokens drawn may decide which of them are verified."""

    def draw(self, distribution: Distribution, streams: RandomStreams, start: int, i: int) -> int:
        """Draw draft token `i`, from 0, of a round whose first one has index `start` in the sequence."""

    def verify(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> Verification:
        """Verify a draft whose first token has index `start` in the whole sequence."""

    def acceptance(self, token: int, q: Distribution, p: Distribution, drawn: int) -> float:
        """The chance that a token of q would have been accepted, given that `drawn` came from p instead."""
