"""A prompt in, pieces of text out, and at the end the whole with its statistics.

The consumer may stop at any time; what was produced until then stays available. Knows models only
through the protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from llamaspec.engine.decode import LANE, Speculation, decode
from llamaspec.engine.text import Span, TextAssembler
from llamaspec.errors import PromptError
from llamaspec.protocols import Drafter, Model, Vocabulary
from llamaspec.rules.stats import Summary, summarize
from llamaspec.values import Ask, Round, TokenArray

PREFILL_PART = 512  # tokens read between two reports of progress

Progress = Callable[[int, int], None]  # (tokens read, tokens to read)


class StopReason(str, Enum):
    """Why a text ended."""

    END = "end"  # the model said so
    LIMIT = "limit"  # as many tokens as were asked for
    STOP = "stop"  # a stop string
    CONTEXT = "context"  # the context is full
    INTERRUPT = "interrupt"  # the consumer stopped


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became certain with one token; empty pieces are not made."""

    text: str
    token: int  # the token that made it certain
    spans: tuple[Span, ...]  # the same text, split by where it came from

    @property
    def drafted(self) -> bool:
        """Whether all of the text came from accepted guesses."""
        return all(span.drafted for span in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A finished text."""

    text: str
    tokens: tuple[int, ...]  # of the text, without the end-of-text token
    n_prompt_tokens: int
    stop_reason: StopReason
    rounds: tuple[Round, ...]
    summary: Summary
    prefill_seconds: float  # reading the prompt, by target and draft
    n_remembered: int = 0  # tokens of the prompt that the target knew from before


class TextStream:
    """Iterate to generate; `completion` tells what came of it, also after an early stop.

    Parameters
    ----------
    prompt : [n] int32
        Tokens of the prompt.
    max_tokens : int
        At most this many new tokens.
    stops : sequence of str
        Strings that end the text; they are not part of it.
    on_prefill : callable, optional
        Told how many tokens of the prompt have been read, of how many.
    n_remembered : int
        How many of the prompt's first tokens the target knows already; reading begins behind them.

    Raises
    ------
    PromptError
        The prompt is empty or does not fit the target's context.
    """

    def __init__(
        self,
        prompt: TokenArray,
        vocabulary: Vocabulary,
        speculation: Speculation,
        *,
        max_tokens: int = 256,
        stops: Sequence[str] = (),
        on_prefill: Progress | None = None,
        n_remembered: int = 0,
    ) -> None:
        context_size = speculation.target.context_size
        if len(prompt) == 0:
            raise PromptError("the prompt is empty; give some text to continue")
        if len(prompt) >= context_size:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens, which leaves no room in a context of {context_size}; "
                f"shorten it or pass a larger --n-ctx"
            )
        if max_tokens < 1:
            raise ValueError(f"max tokens must be >= 1, got {max_tokens}")
        self._prompt = prompt
        self._limit = min(len(prompt) + max_tokens, context_size)
        self._reason_at_limit = (
            StopReason.LIMIT if self._limit == len(prompt) + max_tokens else StopReason.CONTEXT
        )
        self._vocabulary = vocabulary
        self._speculation = speculation
        self._on_prefill = on_prefill
        self._n_remembered = n_remembered
        self._text = TextAssembler(stops)
        self._shown: list[str] = []
        self._tokens: list[int] = []
        self._rounds: list[Round] = []
        self._ended = 0  # 1 when the model's end-of-text token came
        self._prefill_seconds = 0.0
        self._stop_reason = StopReason.INTERRUPT
        self._pieces = self._generate()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    def run(self) -> Completion:
        """Generate to the end."""
        for _ in self._pieces:
            pass
        return self.completion

    def close(self) -> None:
        """Stop generating."""
        self._pieces.close()

    @property
    def completion(self) -> Completion:
        """What has been generated up to now."""
        return Completion(
            text="".join(self._shown),
            tokens=tuple(self._tokens),
            n_prompt_tokens=len(self._prompt),
            stop_reason=self._stop_reason,
            rounds=tuple(self._rounds),
            summary=summarize(self._rounds, len(self._tokens) + self._ended),
            prefill_seconds=self._prefill_seconds,
            n_remembered=self._n_remembered,
        )

    def _generate(self) -> Generator[Piece, None, None]:
        clock = self._speculation.clock
        start = clock()
        target, drafter = self._speculation.target, self._speculation.drafter
        prefill(self._prompt, target, drafter, self._on_prefill, start=self._n_remembered)
        self._prefill_seconds = clock() - start
        for round_ in decode(self._prompt, self._limit, self._speculation):
            self._rounds.append(round_)
            yield from self._kept(round_)
            if self._stop_reason is not StopReason.INTERRUPT:
                return
        self._stop_reason = self._reason_at_limit
        yield from self._shown_piece(self._text.finish(), self._tokens[-1])

    def _kept(self, round_: Round) -> Iterator[Piece]:
        """The pieces of one round, up to where the text ends."""
        for i, token in enumerate(round_.tokens.tolist()):
            if self._vocabulary.is_end(token):
                self._stop_reason, self._ended = StopReason.END, 1
                yield from self._shown_piece(self._text.finish(), token)
                return
            self._tokens.append(token)
            spans = self._text.add(self._vocabulary.piece(token), drafted=i < round_.n_accepted)
            yield from self._shown_piece(spans, token)
            if self._text.stopped:
                self._stop_reason = StopReason.STOP
                return

    def _shown_piece(self, spans: list[Span], token: int) -> Iterator[Piece]:
        if spans:
            text = "".join(span.text for span in spans)
            self._shown.append(text)
            yield Piece(text, token, tuple(spans))


def prefill(
    prompt: TokenArray,
    target: Model,
    drafter: Drafter,
    on_progress: Progress | None = None,
    *,
    start: int = 0,
) -> None:
    """Read a prompt into both memories, so that decoding begins with the last token of it.

    The first `start` tokens are known to the target. Asked for less than that, it would forget the rest.
    """
    n_read = len(prompt) - 1
    for begin in range(start, n_read, PREFILL_PART):
        end = min(begin + PREFILL_PART, n_read)
        target.logits([Ask(LANE, prompt[:end], 0)])
        if on_progress is not None:
            on_progress(end, n_read)
    drafter.prepare(prompt)
