"""The protocols between the packages: models, drafters, length policies, acceptance rules, random streams.

Nothing here must be inherited: any object with these methods fits. The fakes beside the tests implement each
protocol in a few lines.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from enum import IntEnum
from typing import Protocol, TypeAlias, runtime_checkable

from llamaspec.errors import ContextFullError, RowsMissingError
from llamaspec.values import (
    Distribution,
    Draft,
    Evaluation,
    Forward,
    ForwardRequest,
    HiddenRows,
    Logits,
    Round,
    Rows,
    TokenArray,
    UnusedDraft,
    Verification,
)

Unprepared: TypeAlias = ContextFullError | RowsMissingError  # why a request cannot be evaluated
Drafting: TypeAlias = Generator[ForwardRequest, Forward, Draft]  # asks for evaluations, ends with a draft
Preparing: TypeAlias = Generator[ForwardRequest, Forward, None]
Asking: TypeAlias = Generator[ForwardRequest, Forward, Forward]
FindingRow: TypeAlias = Generator[ForwardRequest, Forward, int]


class Model(Protocol):
    """Evaluates sequences; only the compute thread calls it.

    A number identifies each running sequence. Requests name all tokens of a sequence, and the model compares
    them with the cached ones, so a request without the rejected tokens rolls them back.
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
    def max_scored(self) -> int:
        """Maximum number of positions in one evaluation that have logits."""

    @property
    def n_cells(self) -> int | None:
        """Size of the KV cache that all sequences share, in tokens; None if each has its own memory."""

    @property
    def can_share(self) -> bool:
        """Whether an evaluation may include several sequences, and padding."""

    @property
    def max_chunked_prefill(self) -> int:
        """Maximum width of an evaluation of rounds together with a prompt chunk; 0 = never together."""

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took cores from the latest evaluation."""

    def attended(self, n_tokens: int) -> float:
        """Return how many of `n_tokens` cached tokens a position attends to, averaged over the layers."""

    def prepare(self, batch: Sequence[tuple[int, ForwardRequest, int]]) -> Sequence[int | Unprepared]:
        """Make room for requests of different sequences: (number, request, maximum positions of padding).

        Cached tokens that the request of their sequence does not contain are dropped. Returns for each
        request the number of its tokens that are cached, at most those before the first with logits; or the
        error if there is no room, even without unused prefixes, or if hidden rows are missing.
        """

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests of different sequences together: a list of [n_logits + K, V] float32.

        The arrays are read-only, and valid until the next call.

        Raises
        ------
        EvaluationAbortedError
            Another thread called `abort`. The cache is as before.
        EvaluationError
            llama.cpp failed.
        """

    def hidden(self, number: int) -> HiddenRows | None:
        """Return the hidden rows that the last evaluation has computed for a request that asked for them.

        Valid until the next evaluation. Only called for requests with `rows_from` or `hidden`.
        """

    def release(self, number: int) -> None:
        """Release a sequence that has ended or is swapped out. Any sequence may reuse its cached tokens."""

    def forget(self) -> None:
        """Empty the KV cache, as if nothing had been evaluated."""

    def recover(self) -> str | None:
        """Check the cache while no sequence runs. If it contradicts itself, empty it and return how."""

    def abort(self) -> None:
        """Abort a running evaluation; may be called from any thread."""


class Vocabulary(Protocol):
    """Text to tokens and back."""

    def tokenize(self, text: bytes) -> TokenArray:
        """Return the token ids of a text, with the special tokens that the model wants at its start."""

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, possibly a part of a UTF-8 character."""

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
        """Return the token ids of a text; `add_special` adds the tokens that the model wants at its start."""


def token_names(vocabulary: WholeVocabulary) -> list[bytes]:
    """Return the bytes of each token, [V]; for a special token the byte 0xff, then its name.

    UTF-8 never contains 0xff. llguidance recognises special tokens by it.
    """
    specials = vocabulary.specials
    return [
        b"\xff" + specials[token] if token in specials else vocabulary.piece(token)
        for token in range(vocabulary.size)
    ]


class SequenceConstraint(Protocol):
    """The tokens allowed next in one sequence: a pure function of the tokens generated so far."""

    def allowed(self, generated: TokenArray) -> TokenArray:
        """Return the tokens that may come next: int32 [A], ascending.

        They include the end-of-text tokens if the completion may end here. There are none after an
        end-of-text token, or after tokens that were not allowed.
        """

    def forced(self, generated: TokenArray) -> TokenArray:
        """Return the tokens that must come next, as far as they are known: int32 [F]."""

    def is_complete(self, generated: TokenArray) -> bool:
        """Whether the completion may end here."""


class Constraint(Protocol):
    """Restricts completions; compiled once, for any number of sequences and threads."""

    def start_sequence(self) -> SequenceConstraint:
        """Start a sequence."""


class SequenceLength(Protocol):
    """Chooses how many tokens are drafted for one sequence."""

    @property
    def reading(self) -> PromptReading | None:
        """Decides when the draft model processes the prompt; None = at once."""

    def wants_more(self, draft: Draft) -> bool:
        """Whether to draft one more token after `draft`, from the same source."""

    def longest_copy(self) -> int:
        """Return the maximum number of tokens to copy in this round; a drafter looks no further ahead."""

    def n_verified(self, draft: Draft) -> int:
        """Return how many tokens of a draft the target verifies.

        `Round.counterfactual` says whether the first of the others would have been accepted. Unless the rule
        `drops`, the answer must not depend on the tokens drawn: it is none, or all.
        """

    def begin_round(self, depth: float, others: Sequence[SequenceLength]) -> None:
        """Begin a round of a sequence, in an evaluation together with `others`.

        `depth` is the number of cached tokens that a position of the sequence attends to.
        """

    def timed_width(self) -> int | None:
        """Return the width to pad a round of a sequence that is alone to, to time it; None = no padding."""

    def observe(self, round_: Round) -> Round:
        """Learn from the costs and gains of a round of this sequence; return it with `stalled_seconds`."""

    def close(self) -> None:
        """End the sequence."""


class PromptReading(Protocol):
    """Decides when the draft model processes the prompt of one sequence."""

    @property
    def n_to_read(self) -> int:
        """Prompt tokens for the draft model to process in this round instead of drafting; 0 = the rest."""

    @property
    def is_winning(self) -> bool:
        """Whether drafts were faster lately: prediction heads then process the prompt beside the target."""

    @property
    def unused(self) -> UnusedDraft | None:
        """Why the draft model has not processed the prompt; None if it has."""

    def start_prompt(self, n_unread: int) -> None:
        """Start a completion. The draft model has not processed `n_unread` tokens of its prompt."""

    def observe_prompt(self, evaluation: Evaluation, seconds: float) -> None:
        """Learn from a prompt chunk that the target processed in an evaluation of its own."""

    def observe_reading(self, n: int, seconds: float) -> None:
        """Learn from `n` tokens that the draft model processed."""

    def plain_seconds(self, evaluation: Evaluation) -> float | None:
        """Return the expected seconds of an evaluation without its drafts; None before one was timed."""


class LengthPolicy(Protocol):
    """Chooses how many tokens are drafted; shared by all sequences of a pair."""

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> SequenceLength:
        """Start a completion of at most `max_tokens`; `drops` as in `Rule`."""


class Drafter(Protocol):
    """Proposes tokens. Each method may be a plain function, or a coroutine that yields `ForwardRequest`s."""

    def prepare(self, context: TokenArray) -> Preparing | None:
        """Process the prompt before the first round, or do nothing."""

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting | Draft:
        """Return draft tokens to follow the whole `context`, no more than `length` wants."""


@runtime_checkable
class RowReader(Protocol):
    """A drafter that reads the target's hidden rows. It gets them from the loop, never from the target."""

    @property
    def reads_rows(self) -> bool:
        """Whether it wants hidden rows."""

    def first_row(self, prompt: TokenArray) -> FindingRow | int:
        """Return the first position of a prompt whose hidden row it needs; 0 = all of them."""

    def committed(self, tokens: TokenArray, rows: Rows, position: int) -> None:
        """Take in tokens that have become a part of the sequence, with the hidden row of each: [n, F].

        `position` is that of the first token. Runs come in order: chunks of the prompt, then the last token
        and the accepted draft tokens of each round. Rows may be missing between two runs. The array is valid
        only during the call.
        """


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

    def chance(self, probability: float, stream: Stream, position: int, attempt: int = 0) -> bool:
        """True with the given probability."""


class TargetDistributions(Protocol):
    """The target's distributions along a draft, computed on demand."""

    def after(self, i: int) -> Distribution:
        """Return p after the context and draft tokens 0 to `i`; -1 = after the context alone."""


class Rule(Protocol):
    """Decides which draft tokens are accepted, so that completions have the target's distribution."""

    @property
    def name(self) -> str:
        """The name that users give."""

    @property
    def drops(self) -> bool:
        """Whether draft tokens may be dropped before verification because of the tokens that were drawn."""

    def draw(self, distribution: Distribution, streams: RandomStreams, start: int, i: int) -> int:
        """Draw draft token `i`, counted from 0; the first of the round has index `start` in the sequence."""

    def verify(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> Verification:
        """Verify a draft whose first token has index `start` in the sequence."""

    def acceptance(self, token: int, q: Distribution, p: Distribution, drawn: int) -> float:
        """Return the chance that a token of q would have been accepted, given that `drawn` came from p."""
