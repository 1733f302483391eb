"""An answer as it arrives, read by coroutines that wait for more of it where they need more to decide.

So a reader is written as if the whole text were there, and where the text was split makes no difference:
decisions depend on its characters alone. What a reader holds back is bounded. Knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

MAX_HELD = 1 << 16  # characters that may turn out to be no call after all

Result = TypeVar("Result")
Reading = Generator[None, None, Result]  # yields where it needs more text
Sink = Callable[[str], None]

_SPECIAL_OUTSIDE = re.compile(r'["{}\[\]]')
_SPECIAL_INSIDE = re.compile(r'["\\]')
_NO_SPACE = re.compile(r"\S")
_SCALAR_END = re.compile(r"[\s,}\]]")


class MalformedError(Exception):
    """What was begun does not go on as its format says; `excess` is taken and not used."""

    def __init__(self, excess: str = "") -> None:
        super().__init__()
        self.excess = excess


class Held:
    """Text that is taken but not understood yet, up to a number of characters."""

    def __init__(self, text: str = "", limit: int = MAX_HELD) -> None:
        self.text = text
        self._limit = limit

    def __call__(self, text: str) -> None:
        """Take more."""
        room = max(0, self._limit - len(self.text))
        self.text += text[:room]
        if len(text) > room:
            raise MalformedError(text[room:])


def nowhere(_text: str) -> None:
    """Receives what is of no interest."""


class Incoming:
    """The part of an answer that has come and is not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # what stands before is read
        self._is_complete = False

    def add(self, text: str) -> None:
        """More of the answer."""
        self._text, self._at = self._text[self._at :] + text, 0

    def complete(self) -> None:
        """Nothing follows."""
        self._is_complete = True

    def until(self, marks: Sequence[str], sink: Sink) -> Reading[str | None]:
        """Pass the text before the first mark on and take the mark; None where the answer ends without one.

        Among marks one may end with another, but not otherwise contain it.
        """
        pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                self._take(found.start(), sink)
                self._take(found.end(), nowhere)
                return found[0]
            n_held = 0 if self._is_complete else self._possible_beginning(marks)
            self._take(len(self._text) - n_held, sink)
            if self._is_complete:
                return None
            yield

    def space(self, sink: Sink = nowhere) -> Reading[None]:
        """Take whitespace."""
        while True:
            found = _NO_SPACE.search(self._text, self._at)
            self._take(found.start() if found is not None else len(self._text), sink)
            if found is not None or self._is_complete:
                return
            yield

    def takes(self, word: str, sink: Sink = nowhere) -> Reading[bool]:
        """Take a word if it comes next."""
        while not self._is_complete and len(self._text) - self._at < len(word):
            if not word.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(word, self._at):
            return False
        self._take(self._at + len(word), sink)
        return True

    def next_character(self) -> Reading[str]:
        """The character that comes next, which stays; "" at the end."""
        while self._at == len(self._text) and not self._is_complete:
            yield
        return self._text[self._at : self._at + 1]

    def json_value(self, sink: Sink) -> Reading[bool]:
        """Pass a value of JSON on, up to its end; whether it has one.

        Only its brackets and quotes are looked at: what stands between them is the receiver's business.
        """
        first = yield from self.next_character()
        if not first or first in ",:}]":
            return False
        if first not in '{["':
            return (yield from self._scalar(sink))
        depth, in_string, is_escaped = 0, False, False
        while True:
            at, is_escaped = self._at + is_escaped, False
            while found := (_SPECIAL_INSIDE if in_string else _SPECIAL_OUTSIDE).search(self._text, at):
                at = found.end()
                if found[0] == "\\":
                    is_escaped = at == len(self._text)  # what comes next
                    at += 1
                elif found[0] == '"':
                    in_string = not in_string
                else:
                    depth += 1 if found[0] in "{[" else -1
                if depth <= 0 and not in_string:
                    self._take(at, sink)
                    return True
            self._take(len(self._text), sink)
            if self._is_complete:
                return False
            yield

    def _scalar(self, sink: Sink) -> Reading[bool]:
        """A number or a word."""
        while True:
            found = _SCALAR_END.search(self._text, self._at)
            self._take(found.start() if found is not None else len(self._text), sink)
            if found is not None or self._is_complete:
                return found is not None
            yield

    def _take(self, end: int, sink: Sink) -> None:
        """Pass the text up to a place on."""
        taken, self._at = self._text[self._at : end], end
        try:
            if taken:
                sink(taken)
        except MalformedError as error:
            self._at -= len(error.excess)
            raise

    def _possible_beginning(self, marks: Sequence[str]) -> int:
        """Length of the longest end of the text that begins a mark."""
        longest = max(map(len, marks), default=1) - 1
        lengths = range(min(longest, len(self._text) - self._at), 0, -1)
        return next((n for n in lengths if any(mark.startswith(self._text[-n:]) for mark in marks)), 0)
