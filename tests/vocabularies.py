"""Fake vocabularies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fakes import tokens
from llamaspec.protocols import WholeVocabulary
from llamaspec.values import TokenArray


@dataclass
class FakeVocabulary:
    """Splits a text greedily, the longest piece first; drops bytes that no piece spells."""

    pieces: Sequence[bytes]
    specials: Mapping[int, bytes] = field(default_factory=dict)
    bos: int = -1
    eos: int = -1
    adds_bos: bool = False
    adds_space: bool = False

    def __post_init__(self) -> None:
        pieces = {self.piece(token): token for token in reversed(range(self.size))}  # the first of several
        self._by_piece = {piece: token for piece, token in pieces.items() if piece}
        self._longest = max(map(len, self._by_piece), default=0)

    @property
    def size(self) -> int:
        return len(self.pieces)

    def piece(self, token: int) -> bytes:
        return b"" if token in self.specials else self.pieces[token]

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.eos,)

    def is_end(self, token: int) -> bool:
        return token == self.eos

    def tokenize(self, text: bytes, *, add_special: bool = True) -> TokenArray:
        text.decode()  # llama.cpp wants UTF-8
        text = b" " + text if self.adds_space and text else text
        found = [self.bos] if add_special and self.adds_bos else []
        at = 0
        while at < len(text):
            fits = (self._by_piece.get(text[at : at + n]) for n in range(self._longest, 0, -1))
            token = next((token for token in fits if token is not None), None)
            found += [] if token is None else [token]
            at += 1 if token is None else len(self.piece(token))
        return tokens(*found)


def spelled(vocabulary: WholeVocabulary, found: TokenArray) -> bytes:
    """Return the text of tokens, with the names of special tokens."""
    return b"".join(vocabulary.specials.get(token) or vocabulary.piece(token) for token in found.tolist())
