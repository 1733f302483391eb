"""Escaping of control tokens: only a chat template can write one, never a message.

Before a template is rendered, any text from users, tools and clients that spells a control token, or could
complete one, is replaced letter by letter with private-use characters, which survive trimming, slicing and
splitting. All control tokens in the rendered text are then the template's own, and the letters are put back.
A template that joins parts of a message itself is trusted. tests/chat/test_escaping.py attacks it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_PRIVATE = range(0xF0000, 0xFFFFE)  # code points that Unicode leaves unassigned
_NAMES = ("type", "required")  # JSON schema keywords whose values templates compare

Json = Any  # a result of json.loads
Span = tuple[int, int]  # [start, end) in bytes


class SpecialTokens:
    """The spellings of a vocabulary's control tokens; empty ones are left out."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self._spellings = sorted({text for text in spellings if text}, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self._spellings)) or r"(?!)")
        self._in_bytes = re.compile(self.pattern.pattern.encode())
        self._longest = max(map(len, self._spellings), default=0)
        self._beginnings = {text[:n] for text in self._spellings for n in range(1, len(text))}
        self._ends = {text[n:] for text in self._spellings for n in range(1, len(text))}

    def spans(self, text: bytes) -> list[Span]:
        """Return where a text spells control tokens."""
        return [found.span() for found in self._in_bytes.finditer(text)]

    def is_inside(self, text: str) -> bool:
        """Whether a text is part of a spelling."""
        return any(text in spelling for spelling in self._spellings)

    def may_begin_at_the_end_of(self, text: str) -> bool:
        """Whether a text ends with the beginning of a spelling."""
        return any(text[-n:] in self._beginnings for n in range(1, self._longest))

    def may_end_at_the_start_of(self, text: str) -> bool:
        """Whether a text begins with the end of a spelling."""
        return any(text[:n] in self._ends for n in range(1, self._longest))


class Escaper:
    """Replaces characters while a template is rendered, each by one that does not occur in `texts`."""

    def __init__(self, special: SpecialTokens, texts: Iterable[str]) -> None:
        self._special = special
        used = set().union(*texts)
        self._free = (character for character in map(chr, _PRIVATE) if character not in used)
        self._replacements: dict[str, str] = {}

    def escape(self, text: str) -> str:
        """Return a text that cannot become a control token; the template can still trim its spaces."""
        text = self._escape_tokens(text)
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        end = start + len(core)
        if self._special.is_inside(core):
            return text[:start] + self._replaced(core) + text[end:]
        if self._special.may_begin_at_the_end_of(core):
            text = text[: end - 1] + self._replaced(text[end - 1]) + text[end:]
        if self._special.may_end_at_the_start_of(core):
            text = text[:start] + self._replaced(text[start]) + text[start + 1 :]
        return text

    def escape_json(self, value: Json, *, is_name: bool = False) -> Json:
        """Return JSON with all strings escaped; keys and names only if they contain a whole token."""
        if isinstance(value, str):
            return self._escape_tokens(value) if is_name else self.escape(value)
        if isinstance(value, Mapping):
            return {
                self._escape_tokens(str(key)): self.escape_json(inner, is_name=key in _NAMES)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.escape_json(inner, is_name=is_name) for inner in value]
        return value

    def unescape(self, text: str) -> str:
        """Return a rendered text with the original characters."""
        return text.translate({ord(new): old for old, new in self._replacements.items()})

    def _escape_tokens(self, text: str) -> str:
        return self._special.pattern.sub(lambda found: self._replaced(found[0]), text)

    def _replaced(self, text: str) -> str:
        for character in text:
            if character not in self._replacements:
                self._replacements[character] = next(self._free)
        return "".join(self._replacements[character] for character in text)


def texts_in(value: Json) -> Iterator[str]:
    """Yield all strings and keys in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in([*map(str, value), *value.values()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation, with the places where the template wrote control tokens."""

    text: bytes  # UTF-8
    specials: tuple[Span, ...]  # ascending

    @classmethod
    def of(cls, escaped: str, special: SpecialTokens, escaper: Escaper) -> Rendered:
        """Return the rendered text of escaped messages."""
        text, specials, start = bytearray(), [], 0
        for found in special.pattern.finditer(escaped):
            text += escaper.unescape(escaped[start : found.start()]).encode()
            specials.append((len(text), len(text) + len(found[0].encode())))
            text += found[0].encode()
            start = found.end()
        text += escaper.unescape(escaped[start:]).encode()
        return cls(bytes(text), tuple(specials))

    def followed_by(self, text: str, special: SpecialTokens | None = None) -> Rendered:
        """Return it with more text, in which only the tokens in `special` are control tokens."""
        more = text.encode()
        spans = () if special is None else special.spans(more)
        n = len(self.text)
        return Rendered(self.text + more, (*self.specials, *((a + n, b + n) for a, b in spans)))

    def after(self, start: int) -> Rendered:
        """Return the text from a place that is not inside a control token."""
        specials = tuple((a - start, b - start) for a, b in self.specials if a >= start)
        return Rendered(self.text[start:], specials)

    def segments(self, special: SpecialTokens) -> Iterator[tuple[bytes, bool]]:
        """Yield the text in few long parts, each with whether control tokens are recognised in it."""
        forged = set(special.spans(self.text)).difference(self.specials)
        begin = end = 0
        for start, stop in (*self.specials, (len(self.text), len(self.text))):
            if any(a < start and end < b for a, b in forged):
                yield self.text[begin:end], True
                yield self.text[end:start], False
                begin = start
            end = stop
        yield self.text[begin:], True
