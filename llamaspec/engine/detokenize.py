"""Tokens to certain text: whole UTF-8 characters, without the possible beginning of a stop string.

Tokens are known only by their bytes. Hand-made tables of splits are in tests/engine/test_text.py.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """A stretch of text and whether it came from an accepted draft token."""

    text: str
    drafted: bool


class TextAssembler:
    """Joins the bytes of tokens to text, up to the first stop string; holds back text that is not certain."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held: deque[Span] = deque()  # text that may be the beginning of a stop string
        self.n_characters = 0  # complete characters, including those held back
        self.stopped = False  # a stop string was found

    def add(self, piece: bytes, drafted: bool) -> list[Span]:
        """Add a token; return the text that it makes certain."""
        text = self._decoder.decode(piece)
        self.n_characters += len(text)
        return self._release(text, drafted)

    def finish(self) -> list[Span]:
        """End the text; return what was held back. An incomplete character becomes U+FFFD."""
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
        """Length of the longest end of `held` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for n in range(min(longest, len(held)), 0, -1):
            if any(stop.startswith(held[-n:]) for stop in self._stops):
                return n
        return 0


def take_characters(spans: deque[Span], n: int) -> list[Span]:
    """Remove the first `n` characters, or all if there are fewer."""
    taken: list[Span] = []
    while n > 0 and spans:
        span = spans.popleft()
        if len(span.text) > n:
            spans.appendleft(Span(span.text[n:], span.drafted))
            span = Span(span.text[:n], span.drafted)
        taken.append(span)
        n -= len(span.text)
    return taken
