"""The part of an answer that has arrived and is not parsed yet, with the readers' basic operations.

Readers are generators that yield when they need more text to decide. This module knows no format of answers.
tests/chat/test_parse.py splits answers at every place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

MAX_HEADER = 512  # characters before the arguments of a call
MAX_SPACE = 64  # characters at the end of a text that may be dropped
_LONGEST_CHANCE = 2  # characters at the end that may look like the beginning of a mark by chance

Result = TypeVar("Result")
Reading = Generator[None, None, Result]  # yields when it needs more text
Sink = Callable[[str], object]


class Incoming:
    """The part of an answer that has arrived and is not parsed yet."""

    def __init__(self) -> None:
        self.text = ""
        self.n_fed = 0  # characters of the answer so far
        self.is_complete = False  # nothing follows
        self.is_cut = False  # complete, but the model would have continued

    def take(self, n: int, sink: Sink | None = None) -> None:
        """Pass on the next characters; without a sink, drop them."""
        taken, self.text = self.text[:n], self.text[n:]
        if taken and sink is not None:
            sink(taken)

    def until(self, marks: Sequence[str], sink: Sink | None, last: Sequence[str] = ()) -> Reading[str | None]:
        """Pass on the text before the first mark and take the mark; None if the answer ends without one.

        A mark may end with another one, but must not contain it elsewhere. `last` are marks that count only
        at the very end of the answer.
        """
        pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        while True:
            found = pattern.search(self.text)
            if found is not None:
                self.take(found.start(), sink)
                self.take(len(found[0]))
                return found[0]
            end = next((mark for mark in last if self.is_complete and self.text.endswith(mark)), None)
            if end is not None:
                self.take(len(self.text) - len(end), sink)
                self.take(len(end))
                return end
            n_held = self._possible_beginning(marks)
            if self.is_complete and not (self.is_cut and n_held > _LONGEST_CHANCE):
                n_held = 0
            self.take(len(self.text) - n_held, sink)
            if self.is_complete:
                self.text = ""
                return None
            yield

    def match(self, pattern: re.Pattern[str]) -> Reading[re.Match[str] | None]:
        """Match a pattern here, without taking the text; more text must not change a match."""
        while True:
            found = pattern.match(self.text, 0, MAX_HEADER)
            if found is not None or self.is_complete or len(self.text) >= MAX_HEADER:
                return found
            yield

    def begins(self, mark: str) -> Reading[bool]:
        """Whether a mark comes next, perhaps after a little whitespace; take nothing."""
        while True:
            rest = self.text.lstrip()
            if len(self.text) - len(rest) > MAX_SPACE:
                return False
            if self.is_complete or len(rest) >= len(mark) or not mark.startswith(rest):
                return rest.startswith(mark)
            yield

    def begins_spaced(self, *texts: str) -> Reading[bool]:
        """Whether one of these texts comes next, with any whitespace in it; take nothing."""
        while True:
            rest = "".join(self.text[:MAX_HEADER].split())
            is_open = not self.is_complete and len(self.text) < MAX_HEADER
            if rest.startswith(texts) or not (is_open and any(text.startswith(rest) for text in texts)):
                return rest.startswith(texts)
            yield

    def drop(self, marks: Sequence[str]) -> Reading[str]:
        """Drop whitespace and these marks; return the last mark, or ""."""
        last = ""
        while True:
            self.text = self.text.lstrip()
            mark = next((mark for mark in marks if self.text.startswith(mark)), "")
            is_open = not self.text or any(each.startswith(self.text) for each in marks)
            if mark:
                self.take(len(mark))
                last = mark
            elif is_open and not self.is_complete:
                yield
            else:
                if is_open and self.is_cut:
                    self.text = ""
                return last

    def json_object(self, sink: Sink) -> Reading[None]:
        """Pass on a JSON object, up to its end or the answer's; only brackets and quotes are parsed."""
        depth, in_string = 0, False
        while True:
            for found in re.finditer(r'\\.|["{}\[\]]', self.text, re.DOTALL):
                if found[0] == '"':
                    in_string = not in_string
                elif found[0] in "{}[]" and not in_string:
                    depth += 1 if found[0] in "{[" else -1
                if depth == 0:
                    self.take(found.end(), sink)
                    return
            if self.is_complete:
                self.take(len(self.text), sink)
                return
            n_backslashes = len(self.text) - len(self.text.rstrip("\\"))
            self.take(len(self.text) - n_backslashes % 2, sink)  # a last one escapes the next character
            yield

    def python_value(self) -> Reading[str]:
        """Take a value in Python's arguments of a call, and return it; what ends it comes next."""
        depth, quote, n = 0, "", 0
        while True:
            for found in re.compile(r"\\.|[\"'()\[\]{},]", re.DOTALL).finditer(self.text, n):
                mark, n = found[0], found.end()
                if quote or mark in "\"'":
                    quote = ("" if mark == quote else quote) if quote else mark
                elif not depth and mark in ",)":
                    n = found.start()
                    break
                else:
                    depth += 1 if mark in "([{" else -1 if mark in ")]}" else 0
            else:
                if not self.is_complete:
                    yield
                    continue
                n = len(self.text)
            value = self.text[:n]
            self.take(n)
            return value

    def _possible_beginning(self, marks: Sequence[str]) -> int:
        """Return how many characters at the end of the text may be the beginning of a mark."""
        lengths = range(min(max(map(len, marks), default=0), len(self.text)), 0, -1)
        return next((n for n in lengths if any(mark.startswith(self.text[-n:]) for mark in marks)), 0)
