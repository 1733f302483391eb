"""Any bytes as tokens of a vocabulary, and the text that target and draft spell differently.

The one idea: the draft's tokens of a text are a pure function of the text. It is cut where every usual
tokenizer begins a new word, by looking at its bytes alone, so a text that goes on or goes back is tokenized
anew only behind the last cut. Knows no model. tests/drafters/test_spelling.py compares used with fresh.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from llamaspec.protocols import WholeVocabulary
from llamaspec.values import NO_TOKENS, TokenArray

SHORTEST, LONGEST = 64, 1024  # bytes between two cuts
_WORD = re.compile(rb"(?<=\S) (?=[A-Za-z])")  # a space after which a word begins
_ANCHORS = (b"\n", b"\x01")  # behind which a text is in its middle


class Spelling:
    """How a vocabulary spells bytes: at the start of a text, or in its middle.

    Parameters
    ----------
    vocabulary : WholeVocabulary
    """

    def __init__(self, vocabulary: WholeVocabulary) -> None:
        self.vocabulary = vocabulary
        self.specials = vocabulary.specials
        self.pieces = [vocabulary.piece(token) for token in range(vocabulary.size)]  # V of them
        self._bytes = {piece[0]: token for token, piece in enumerate(self.pieces) if len(piece) == 1}
        self.adds_space = self.text(vocabulary.tokenize(b"a", add_special=False)) == b" a"

    def text(self, tokens: TokenArray) -> bytes:
        """What tokens spell; nothing for special ones."""
        return b"".join([self.pieces[token] for token in tokens.tolist()])

    def spelling(self, token: int) -> bytes:
        """What one token spells; the name of a special one."""
        return self.pieces[token] or self.specials.get(token, b"")

    def tokens(self, text: bytes, *, at_start: bool = False) -> TokenArray:
        """Bytes as tokens: int32 [n]. What is not UTF-8 is spelled byte by byte, where there are tokens."""
        parts: list[TokenArray] = []
        while text:
            valid, odd, text = _split(text)
            if valid:
                parts.append(self._tokens(valid, at_start=at_start and not parts))
            if odd:
                known = [self._bytes[byte] for byte in odd if byte in self._bytes]
                parts.append(np.array(known, dtype=np.int32))
        return np.concatenate(parts) if parts else NO_TOKENS

    def _tokens(self, text: bytes, *, at_start: bool) -> TokenArray:
        if at_start or not self.adds_space:
            return self.vocabulary.tokenize(text, add_special=False)
        for anchor in _ANCHORS:
            tokens = self.vocabulary.tokenize(anchor + text, add_special=False)
            ends = np.cumsum([len(self.pieces[token]) for token in tokens.tolist()])
            (n,) = np.nonzero(ends == len(anchor) + 1)  # and the space before it
            if len(n):
                return tokens[n[-1] + 1 :]
        return self.vocabulary.tokenize(text, add_special=False)


class Chunk(NamedTuple):
    """A part of a text that is tokenized for good."""

    n_read: int  # tokens of the text that it depends on
    end: int  # bytes of the text up to its end
    n_tokens: int  # of the draft up to its end
    is_start: bool  # whether a text begins behind it


class TextMirror:
    """A text of the target in the tokens of the draft.

    Parameters
    ----------
    target, draft : Spelling
    specials : dict of int to [n] int32
        Special tokens of the target that the draft has, too, under other numbers, or that it leaves out.
    begin : [n] int32
        What the draft begins every text with, unless `specials` has it.
    """

    def __init__(
        self, target: Spelling, draft: Spelling, specials: Mapping[int, TokenArray], begin: TokenArray
    ) -> None:
        self._target, self._draft, self._specials, self._begin = target, draft, specials, begin
        self._context = NO_TOKENS  # that was read
        self._bytes = bytearray()  # its text, without special tokens
        self._ends: list[int] = []  # of the text of each token
        self._chunks: list[Chunk] = []
        self._known = np.empty(
            64, dtype=np.int32
        )  # tokens of the draft up to the last cut, and room for more

    def read(self, context: TokenArray) -> TokenArray:
        """The draft's tokens of all of `context`: int32 [m]."""
        n = min(len(context), len(self._context))
        different = np.flatnonzero(context[:n] != self._context[:n])
        n = int(different[0]) if len(different) else n
        self._go_back(n)
        for token in context[n:].tolist():
            self._add(token)
        self._context = context
        last = self._last
        tail = self._draft.tokens(self._text(last.end, len(self._bytes)), at_start=last.is_start)
        begin = self._begin if context[:1].tolist() != [self._target.vocabulary.bos] else NO_TOKENS
        return np.concatenate((begin, self._known[: last.n_tokens], tail))

    @property
    def _last(self) -> Chunk:
        return self._chunks[-1] if self._chunks else Chunk(0, 0, 0, is_start=True)

    def _go_back(self, n: int) -> None:
        del self._ends[n:]
        del self._bytes[self._ends[-1] if n else 0 :]
        while self._chunks and self._chunks[-1].n_read > n:
            self._chunks.pop()

    def _add(self, token: int) -> None:
        known = self._specials.get(token)
        if known is None:
            self._bytes += self._target.spelling(token)
        self._ends.append(len(self._bytes))
        if known is None:
            self._cut()
        else:
            if len(self._bytes) > self._last.end:
                self._close(len(self._bytes))
            self._keep(known, len(self._bytes), is_start=True)

    def _cut(self) -> None:
        while True:
            begin, n = self._last.end, len(self._bytes)
            found = _WORD.search(self._bytes, begin + SHORTEST, min(n, begin + LONGEST + 1))
            if found:
                self._close(found.start())
            elif n > begin + LONGEST:
                end = begin + LONGEST
                while self._bytes[end] & 0xC0 == 0x80 and end > begin + LONGEST - 3:
                    end -= 1  # not within a character
                self._close(end)
            else:
                return

    def _close(self, end: int) -> None:
        last = self._last
        self._keep(self._draft.tokens(self._text(last.end, end), at_start=last.is_start), end, is_start=False)

    def _keep(self, tokens: TokenArray, end: int, *, is_start: bool) -> None:
        begin = self._last.n_tokens
        if begin + len(tokens) > len(self._known):
            self._known = np.resize(self._known, 2 * (begin + len(tokens)))
        self._known[begin : begin + len(tokens)] = tokens
        self._chunks.append(Chunk(len(self._ends), end, begin + len(tokens), is_start))

    def _text(self, begin: int, end: int) -> bytes:
        """A part of the text, without the space that the target puts before every text."""
        is_padded = (
            self._target.adds_space and self._last.is_start and self._bytes[begin:end].startswith(b" ")
        )
        return bytes(self._bytes[begin + is_padded : end])


def complete(text: bytes) -> bytes:
    """A text without the unfinished character at its end."""
    for n in range(1, min(4, len(text) + 1)):
        byte = text[-n]
        if byte & 0xC0 != 0x80:
            needed = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return text[:-n] if n < needed else text
    return text


def _split(text: bytes) -> tuple[bytes, bytes, bytes]:
    """UTF-8, the bytes behind it that are none, and the rest."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start], text[error.start : error.end], text[error.end :]
    return text, b"", b""
