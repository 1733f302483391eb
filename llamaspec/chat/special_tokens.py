"""Only what a chat template writes may become special tokens, never what a message says.

The one idea: before a template is rendered, whatever in a message is spelled like a control token, or could
complete one, is covered letter by letter with private-use characters, which survive trimming, slicing and
splitting. Control tokens found in the rendered text are then the template's own, and the cover comes off.
A template that itself glues parts of a message together is trusted. tests/chat/test_special_tokens.py tries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.values import NO_TOKENS, TokenArray

_PRIVATE = range(0xF0000, 0xFFFFE)  # code points that Unicode gives to nobody

Span = tuple[int, int]  # [start, end) in bytes


class SpecialTokens:
    """How a vocabulary spells its control tokens.

    Parameters
    ----------
    spellings : iterable of str
        In any order; empty ones count as none.
    """

    def __init__(self, spellings: Iterable[str]) -> None:
        self._spellings = sorted({text for text in spellings if text}, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self._spellings)) or r"(?!)")
        self._in_bytes = re.compile(self.pattern.pattern.encode())
        self._longest = max(map(len, self._spellings), default=0)
        self._beginnings = {text[:n] for text in self._spellings for n in range(1, len(text))}
        self._ends = {text[n:] for text in self._spellings for n in range(1, len(text))}

    def spans(self, text: bytes) -> list[Span]:
        """Where control tokens are spelled in a text."""
        return [found.span() for found in self._in_bytes.finditer(text)]

    def is_inside(self, text: str) -> bool:
        """Whether a text is a part of some spelling."""
        return any(text in spelling for spelling in self._spellings)

    def may_begin_at_the_end_of(self, text: str) -> bool:
        """Whether a text ends with the beginning of a spelling."""
        return any(text[-n:] in self._beginnings for n in range(1, self._longest))

    def may_end_at_the_start_of(self, text: str) -> bool:
        """Whether a text begins with the end of a spelling."""
        return any(text[:n] in self._ends for n in range(1, self._longest))


class Cover:
    """Characters that stand for others while a template is rendered, one for one.

    Parameters
    ----------
    special : SpecialTokens
    texts : iterable of str
        All that will be rendered: no character of it is used.
    """

    def __init__(self, special: SpecialTokens, texts: Iterable[str]) -> None:
        self._special = special
        used = set().union(*texts)
        self._free = (character for character in map(chr, _PRIVATE) if character not in used)
        self._stand_ins: dict[str, str] = {}

    def put_on(self, text: str) -> str:
        """A message in which nothing can become special; spaces at its ends stay for the template to trim."""
        text = self._special.pattern.sub(lambda found: self._covered(found[0]), text)
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        end = start + len(core)
        if self._special.is_inside(core):
            return text[:start] + self._covered(core) + text[end:]
        if self._special.may_begin_at_the_end_of(core):
            text = text[: end - 1] + self._covered(text[end - 1]) + text[end:]
        if self._special.may_end_at_the_start_of(core):
            text = text[:start] + self._covered(text[start]) + text[start + 1 :]
        return text

    def take_off(self, text: str) -> str:
        """A rendered text with what was covered."""
        return text.translate({ord(cover): character for character, cover in self._stand_ins.items()})

    def _covered(self, text: str) -> str:
        for character in text:
            if character not in self._stand_ins:
                self._stand_ins[character] = next(self._free)
        return "".join(self._stand_ins[character] for character in text)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as a text, and where in it the template wrote control tokens."""

    text: bytes  # UTF-8
    specials: tuple[Span, ...]  # ascending

    @classmethod
    def of(cls, covered: str, special: SpecialTokens, cover: Cover) -> Rendered:
        """What a template made of covered messages."""
        text, specials, start = bytearray(), [], 0
        for found in special.pattern.finditer(covered):
            text += cover.take_off(covered[start : found.start()]).encode()
            specials.append((len(text), len(text) + len(found[0].encode())))
            text += found[0].encode()
            start = found.end()
        text += cover.take_off(covered[start:]).encode()
        return cls(bytes(text), tuple(specials))

    def after(self, start: int) -> Rendered:
        """The text from a place on that is in no control token."""
        specials = tuple((a - start, b - start) for a, b in self.specials if a >= start)
        return Rendered(self.text[start:], specials)

    def stretches(self, special: SpecialTokens) -> Iterator[tuple[bytes, bool]]:
        """The text in parts: whether control tokens are to be recognised in them.

        As few as possible, so that the tokenizer sees the text as it would without any of this.
        """
        forged = set(special.spans(self.text)).difference(self.specials)
        begin = end = 0
        for start, stop in (*self.specials, (len(self.text), len(self.text))):
            if any(a < start and end < b for a, b in forged):
                yield self.text[begin:end], True
                yield self.text[end:start], False
                begin = start
            end = stop
        yield self.text[begin:], True


def tokenize(rendered: Rendered, vocabulary: LlamaVocabulary, special: SpecialTokens) -> TokenArray:
    """Token ids of a rendered conversation or a part of one, without a token that begins it: int32 [n]."""
    parts = [
        vocabulary.tokenize(text, add_special=False, parse_special=is_trusted)
        for text, is_trusted in rendered.stretches(special)
        if text
    ]
    return np.concatenate(parts) if parts else NO_TOKENS
