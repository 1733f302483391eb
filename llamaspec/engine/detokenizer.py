"""From tokens to text: whole UTF-8 characters, up to a stop string or an end-of-text token.

Text is held back while it may be the beginning of a stop string. tests/engine/test_detokenizer.py.
"""

from __future__ import annotations

import codecs
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from llamaspec.engine.completion import StopReason
from llamaspec.protocols import SequenceConstraint, Vocabulary
from llamaspec.values import Logprobs, Round


class Span(NamedTuple):
    """A stretch of text and whether it came from an accepted draft token."""

    text: str
    drafted: bool


class Piece(NamedTuple):
    """The text that one token made certain; empty if a character or a stop string is still incomplete."""

    text: str
    token: int
    spans: tuple[Span, ...]  # the same text, split by origin
    logprobs: Logprobs | None = None  # of the token, if requested
    begin: int = 0  # characters before the text of this token, which may come in a later piece

    @property
    def drafted(self) -> bool:
        """Whether there is text, all of it from accepted draft tokens."""
        return bool(self.spans) and all(span.drafted for span in self.spans)


class Detokenizer:
    """Turns the tokens of a completion into pieces of text, and finds its end.

    `spelled` gives the text of control tokens; the others have none.
    """

    def __init__(
        self, vocabulary: Vocabulary, stops: Sequence[str] = (), spelled: Mapping[int, bytes] | None = None
    ) -> None:
        self._vocabulary, self._spelled = vocabulary, spelled or {}
        self._text = TextAssembler(stops)
        self._tokens: list[int] = []  # of the completion
        self._last: Piece | None = None
        self.end: StopReason | None = None  # None until the completion ends

    def is_end(self, token: int) -> bool:
        """Whether a token ends the completion."""
        return self._vocabulary.is_end(token)

    def add(self, round_: Round, constraint: SequenceConstraint | None = None) -> tuple[Piece, ...]:
        """Return a piece for each token of a round, up to the end of the completion."""
        pieces: list[Piece] = []
        logprobs = round_.logprobs or itertools.repeat(None)
        for i, (token, of_token) in enumerate(zip(round_.tokens.tolist(), logprobs, strict=False)):
            begin = self._text.n_characters
            if self.is_end(token):
                is_complete = constraint is None or constraint.is_complete(np.array(self._tokens, np.int32))
                self.end = StopReason.END if is_complete else StopReason.CONSTRAINT
                pieces.append(Piece("", token, (), of_token, begin))
                break
            self._tokens.append(token)
            piece = self._spelled.get(token) or self._vocabulary.piece(token)
            spans = self._text.add(piece, drafted=i < round_.n_accepted)
            pieces.append(Piece(_text_of(spans), token, tuple(spans), of_token, begin))
            if self._text.stopped:
                self.end = StopReason.STOP
                break
        self._last = pieces[-1]
        return tuple(pieces)

    def rest(self) -> tuple[Piece, ...]:
        """Return the text that is still held back, as at most one piece."""
        spans = self._text.finish()
        if not spans or self._last is None:
            return ()
        return (self._last._replace(text=_text_of(spans), spans=tuple(spans), logprobs=None),)


class TextAssembler:
    """Joins the bytes of tokens to text, up to the first stop string; holds back text that is not certain."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held: deque[Span] = deque()  # may be the beginning of a stop string
        self.n_characters = 0  # complete characters, including those held back
        self.stopped = False  # a stop string was found

    def add(self, piece: bytes, drafted: bool) -> list[Span]:
        """Add the bytes of a token; return the text that it makes certain."""
        text = self._decoder.decode(piece)
        self.n_characters += len(text)
        return self._release(text, drafted)

    def finish(self) -> list[Span]:
        """End the text; return the rest of it. An incomplete character becomes U+FFFD."""
        spans = self._release(self._decoder.decode(b"", final=True), drafted=False)
        return spans if self.stopped else [*spans, *self._held]

    def _release(self, text: str, drafted: bool) -> list[Span]:
        if self.stopped or not text:
            return []
        if not self._stops:
            return [Span(text, drafted)]
        self._held.append(Span(text, drafted))
        held = "".join(span.text for span in self._held)
        found = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            return take_characters(self._held, min(found))
        return take_characters(self._held, len(held) - self._possible_beginning(held))

    def _possible_beginning(self, held: str) -> int:
        """Return the length of the longest suffix of `held` that is a prefix of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for n in range(min(longest, len(held)), 0, -1):
            if any(stop.startswith(held[-n:]) for stop in self._stops):
                return n
        return 0


def take_characters(spans: deque[Span], n: int) -> list[Span]:
    """Remove and return the first `n` characters, or all if there are fewer."""
    taken: list[Span] = []
    while n > 0 and spans:
        span = spans.popleft()
        if len(span.text) > n:
            spans.appendleft(Span(span.text[n:], span.drafted))
            span = Span(span.text[:n], span.drafted)
        taken.append(span)
        n -= len(span.text)
    return taken


def _text_of(spans: Sequence[Span]) -> str:
    return "".join([span.text for span in spans])
