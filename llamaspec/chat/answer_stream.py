"""An answer while it is generated: its deltas, and thinking ended where it goes on too long.

Thinking is ended by a second request: the prompt, what was thought, and the mark that closes it. Both parts
look like one stream from outside. Knows neither the pair nor how it draws: it is handed what opens a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamaspec.chat.parse import AnswerParser, Delta
from llamaspec.chat.transcript import tokenize_inside
from llamaspec.engine.generation import Completion, Piece, StopReason
from llamaspec.engine.statistics import summarize
from llamaspec.engine.stream import TextStream
from llamaspec.errors import PromptError
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.values import Round, TokenArray

OpenStream = Callable[[TokenArray, int], TextStream]  # of a prompt, with at most so many tokens


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What one token made certain of an answer."""

    deltas: tuple[Delta, ...]
    piece: Piece | None  # None where it was no token: thinking was ended, or the answer
    cut: str = ""  # what ended thinking


class AnswerStream:
    """Iterate to generate; `completion` tells what came of it, at any time.

    `max_tokens` is that of the answer with its reasoning, `reasoning_budget` that of the reasoning.
    `open_stream` uses the same seed each time, and spells the control tokens of the answer's format:
    `pair.stream(prompt, max_tokens=n, seed=seed, spelled=answer_format.spelled(...))`.
    """

    def __init__(
        self,
        prompt: TokenArray,
        max_tokens: int,
        open_stream: OpenStream,
        parser: AnswerParser,
        vocabulary: LlamaVocabulary,
        reasoning_budget: int | None = None,
    ) -> None:
        self._prompt, self._max_tokens, self._open_stream = prompt, max_tokens, open_stream
        self._parser, self._vocabulary, self._budget = parser, vocabulary, reasoning_budget
        self.n_thought = 0  # tokens of reasoning
        self._is_over = False
        self._notify: Callable[[], object] | None = None
        self._before: Completion | None = None  # until thinking was ended, with what ended it
        self._stream = open_stream(prompt, max_tokens)

    def __iter__(self) -> Iterator[AnswerPart]:
        return self

    def __next__(self) -> AnswerPart:
        if self._is_over:
            raise StopIteration
        return self._cut() or self._part(next(self._stream, None))

    def begin(self, notify: Callable[[], object]) -> None:
        """As `TextStream.begin`."""
        self._notify = notify
        self._stream.begin(notify)

    def ready(self) -> list[AnswerPart]:
        """The parts that exist by now; begins the answer, and does not wait."""
        parts: list[AnswerPart] = []
        while not self._is_over:
            part = self._cut()
            if part is None:
                piece = self._stream.next_ready()
                if piece is None and not self._stream.is_over:
                    break
                part = self._part(piece)
            parts.append(part)
        return parts

    def close(self) -> None:
        """Stop generating; from any thread, within one evaluation."""
        self._is_over = True
        self._stream.close()

    @property
    def is_swapped_out(self) -> bool:
        """As `TextStream.is_swapped_out`."""
        return self._stream.is_swapped_out

    @property
    def is_over(self) -> bool:
        """Whether nothing follows what exists by now."""
        return self._is_over

    @property
    def rounds(self) -> Sequence[Round]:
        """The rounds up to now."""
        return self._stream.rounds if self._before is None else (*self._before.rounds, *self._stream.rounds)

    @property
    def completion(self) -> Completion:
        """What has been generated up to now, reasoning and marks included."""
        last = self._stream.completion
        before = self._before
        if before is None:
            return last
        rounds = (*before.rounds, *last.rounds)
        n_tokens = before.summary.n_tokens + last.summary.n_tokens
        return replace(
            last,
            text=before.text + last.text,
            tokens=(*before.tokens, *last.tokens),
            n_prompt_tokens=before.n_prompt_tokens,
            rounds=rounds,
            summary=summarize(rounds, n_tokens),
            prefill_seconds=before.prefill_seconds + last.prefill_seconds,
            # Thinking that was ended before it began has evaluated nothing.
            n_cached=before.n_cached if before.rounds else min(last.n_cached, before.n_prompt_tokens),
            draft_fault=before.draft_fault or last.draft_fault,
        )

    def _part(self, piece: Piece | None) -> AnswerPart:
        """What a piece makes certain; None: there are no more."""
        if piece is None:
            self._is_over = True
            is_cut = self._stream.completion.stop_reason not in (StopReason.END, StopReason.STOP)
            return AnswerPart(tuple(self._parser.finish(is_cut=is_cut)), None)
        if self._before is not None:
            piece = piece._replace(begin=len(self._before.text) + piece.begin)
        self.n_thought += self._parser.is_thinking
        return AnswerPart(tuple(self._parser.feed(piece.text)), piece)

    def _cut(self) -> AnswerPart | None:
        """The end of thinking, where it has gone on for too long and there is room."""
        reasoning, budget = self._parser.answer_format.reasoning, self._budget
        is_too_long = self._parser.is_thinking and budget is not None and self.n_thought >= budget
        if reasoning is None or not is_too_long:
            return None
        self._budget = None
        if not self._end_thinking(reasoning.cut):
            return None
        return AnswerPart(tuple(self._parser.feed(reasoning.cut)), None, reasoning.cut)

    def _end_thinking(self, cut: str) -> bool:
        """Go on behind the closing mark; whether there is room."""
        tokens = tokenize_inside(self._vocabulary, cut, parse_special=True)
        thought = self._stream.completion
        n_left = self._max_tokens - len(thought.tokens) - len(tokens)
        if n_left < 1:
            return False
        parts = (self._prompt, np.array(thought.tokens, dtype=np.int32), tokens)
        try:
            stream = self._open_stream(np.concatenate(parts), n_left)
        except PromptError:  # the context has no room
            return False
        self._stream.close()
        self._before = replace(
            thought,
            text=thought.text + cut,
            tokens=(*thought.tokens, *tokens.tolist()),
            stop_reason=StopReason.INTERRUPT,
        )
        self._stream = stream
        if self._notify is not None:
            stream.begin(self._notify)
        return True
