"""An answer while it is generated: pieces in, deltas out. Reasoning ends when its budget is used up.

To end it, a second stream continues after the prompt, the reasoning so far and the mark that closes it; from
outside, both look like one stream. A delta of content has the log-probabilities of its tokens, and says which
of its text was drafted. A token belongs to the first delta of content with some of its text, or to none.
tests/chat/test_reasoning.py, tests/chat/test_origins.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from llamaspec.chat.messages import ArgumentsDelta, ContentDelta, Delta, ReasoningDelta, TokenLogprobs
from llamaspec.chat.parse import AnswerParser
from llamaspec.engine.completion import Completion, StopReason, summarize
from llamaspec.engine.detokenizer import Piece, Span, take_characters
from llamaspec.engine.stream import TextStream
from llamaspec.errors import PromptError
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.values import Round, TokenArray

OpenStream = Callable[[TokenArray, int], TextStream]  # (prompt, maximum number of tokens)


class AnswerStream:
    """Iterate to generate; each step returns the deltas of one token, often none.

    `completion` is the completion so far, at any time. `max_tokens` limits the answer with its reasoning,
    `reasoning_budget` only the reasoning; with `max_tokens` 0, only the prompt is processed, so that it is
    cached. `open_stream` must use the same seed each time, and spell the control tokens of the answer's
    format:
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
        self._origins = _Origins()
        self.n_thought = 0  # tokens of reasoning
        self.is_over = False  # no more deltas follow
        self._notify: Callable[[], object] | None = None
        self._before: Completion | None = None  # the reasoning, if its budget ended it
        self._stream = open_stream(prompt, max(1, max_tokens))

    def __iter__(self) -> Iterator[list[Delta]]:
        return self

    def __next__(self) -> list[Delta]:
        if self.is_over:
            raise StopIteration
        deltas = self._end_reasoning_if_due()
        return _joined(self._take(next(self._stream, None)) if deltas is None else deltas)

    def begin(self, notify: Callable[[], object]) -> None:
        """As `TextStream.begin`."""
        self._notify = notify
        self._stream.begin(notify)

    def ready(self) -> list[Delta]:
        """Return the new deltas, neighbours joined. Starts generating, and never waits."""
        found: list[Delta] = []
        while not self.is_over:
            deltas = self._end_reasoning_if_due()
            if deltas is None:
                piece = self._stream.next_ready()
                if piece is None and not self._stream.is_over:
                    break
                deltas = self._take(piece)
            found += deltas
        return _joined(found)

    def close(self) -> None:
        """Stop generating within one evaluation; may be called from any thread."""
        self.is_over = True
        self._stream.close()

    @property
    def is_swapped_out(self) -> bool:
        """As `TextStream.is_swapped_out`."""
        return self._stream.is_swapped_out

    @property
    def waits_for_reader(self) -> bool:
        """As `TextStream.waits_for_reader`."""
        return self._stream.waits_for_reader

    @property
    def rounds(self) -> Sequence[Round]:
        """The rounds so far."""
        return self._stream.rounds if self._before is None else (*self._before.rounds, *self._stream.rounds)

    @property
    def completion(self) -> Completion:
        """The completion so far, with reasoning and marks."""
        last = self._stream.completion
        if not self._max_tokens:
            return _without_tokens(last)
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
            # With a budget of 0, the first stream has evaluated nothing.
            n_cached=before.n_cached if before.rounds else min(last.n_cached, before.n_prompt_tokens),
            draft_fault=before.draft_fault or last.draft_fault,
        )

    def _take(self, piece: Piece | None) -> list[Delta]:
        """Return the deltas that a piece makes certain; None ends the answer."""
        if piece is None:
            self.is_over = True
            is_cut = self._stream.completion.stop_reason not in (StopReason.END, StopReason.STOP)
            return self._origins.added(self._parser.finish(is_cut=is_cut))
        if not self._max_tokens:
            return []
        if self._before is not None:
            piece = piece._replace(begin=len(self._before.text) + piece.begin)
        self.n_thought += self._parser.is_thinking
        self._origins.note(piece)
        return self._origins.added(self._parser.feed(piece.text))

    def _end_reasoning_if_due(self) -> list[Delta] | None:
        """Return the deltas that end the reasoning; None if its budget is not used up, or no answer fits."""
        reasoning, budget = self._parser.answer_format.reasoning, self._budget
        is_too_long = self._parser.is_thinking and budget is not None and self.n_thought >= budget
        if reasoning is None or not is_too_long:
            return None
        self._budget = None
        if not self._end_thinking(reasoning.cut):
            return None
        self._origins.note_text(reasoning.cut)
        return self._origins.added(self._parser.feed(reasoning.cut))

    def _end_thinking(self, cut: str) -> bool:
        """Continue after the closing mark; return False if there is no room."""
        tokens = self._vocabulary.tokenize_inside(cut, parse_special=True)
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


class _Origins:
    """The tokens whose text is in no delta yet, and the origin of that text."""

    def __init__(self) -> None:
        self._tokens: deque[TokenLogprobs] = deque()
        self._spans: deque[Span] = deque()
        self._begin = 0  # characters of the answer before the first span
        self._n_new = 0  # tokens since the last delta of content or reasoning

    def note(self, piece: Piece) -> None:
        """Add a generated token."""
        self._n_new += 1
        self._spans += piece.spans
        if piece.logprobs is not None:
            self._tokens.append(TokenLogprobs(piece.token, piece.logprobs, piece.begin))

    def note_text(self, text: str) -> None:
        """Add text that the model did not write."""
        self._spans.append(Span(text, False))

    def added(self, deltas: Iterable[Delta]) -> list[Delta]:
        """Return the deltas, with the origin of their content and the number of new tokens."""
        found = [self._content(each) if isinstance(each, ContentDelta) else each for each in deltas]
        if found and isinstance(last := found[-1], ContentDelta | ReasoningDelta):
            found[-1] = replace(last, n_tokens=self._n_new)
            self._n_new = 0
        return found

    def _content(self, delta: ContentDelta) -> ContentDelta:
        """Return content with its spans and tokens; drop those of marks, reasoning and calls before it."""
        begin = delta.end - len(delta.text)
        take_characters(self._spans, begin - self._begin)
        spans = take_characters(self._spans, len(delta.text))
        self._begin = delta.end
        return replace(delta, spans=_merged(spans), logprobs=self._tokens_of(begin, delta.end))

    def _tokens_of(self, begin: int, end: int) -> tuple[TokenLogprobs, ...]:
        """Remove the tokens that begin before `end`; return those with text after `begin`."""
        found: list[TokenLogprobs] = []
        while self._tokens and self._tokens[0].begin < end:
            token = self._tokens.popleft()
            # A token with a part of a character counts as having the character.
            token_end = max(self._tokens[0].begin, token.begin + 1) if self._tokens else end
            if token_end > begin:
                found.append(token)
        return tuple(found)


def _without_tokens(done: Completion) -> Completion:
    """Return a completion without the token that was generated only to process the prompt."""
    is_stopped = done.stop_reason is StopReason.INTERRUPT
    return replace(
        done,
        text="",
        tokens=(),
        stop_reason=StopReason.INTERRUPT if is_stopped else StopReason.LIMIT,
        summary=replace(done.summary, n_tokens=0),
    )


def _joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Join neighbouring deltas of one kind; each call begins with a `CallDelta`."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            spans, logprobs = _merged((*last.spans, *delta.spans)), last.logprobs + delta.logprobs
            n_tokens = last.n_tokens + delta.n_tokens
            joined[-1] = ContentDelta(last.text + delta.text, spans, logprobs, n_tokens=n_tokens)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + delta.text, n_tokens=last.n_tokens + delta.n_tokens)
        elif isinstance(delta, ArgumentsDelta) and isinstance(last, ArgumentsDelta):
            joined[-1] = ArgumentsDelta(delta.index, last.text + delta.text)
        else:
            joined.append(delta)
    return joined


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join neighbouring spans of one origin."""
    merged: list[Span] = []
    for span in spans:
        if merged and span.text and merged[-1].drafted == span.drafted:
            merged[-1] = Span(merged[-1].text + span.text, span.drafted)
        elif span.text:
            merged.append(span)
    return tuple(merged)
