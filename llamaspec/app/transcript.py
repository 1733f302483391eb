"""Remembers with which tokens a conversation was read and written, so that asking goes on from there.

A tokenizer need not find again the tokens that a model chose to write a text with, and one that differs
makes the model read all that follows anew. So what is known is not tokenized again. Knows nothing of
turns or templates. tests/app/test_remembered_turns.py measures what is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.values import NO_TOKENS, TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Text and the tokens it stands for; it is known as a whole or not at all."""

    text: bytes
    tokens: TokenArray  # [n]


class Transcript:
    """The tokens of one growing text."""

    def __init__(self, vocabulary: LlamaVocabulary) -> None:
        self._vocabulary = vocabulary
        self._stretches: list[Stretch] = []
        # SentencePiece vocabularies write a space before every text, also in the middle of one.
        first = vocabulary.tokenize(b"a", add_special=False)[:1].tolist()
        self._adds_space = any(vocabulary.piece(token).startswith(b" ") for token in first)

    @property
    def text(self) -> bytes:
        """All that was read and written."""
        return b"".join(stretch.text for stretch in self._stretches)

    def read(self, text: bytes) -> TokenArray:
        """Tokens of a text, beginning with those known for as long as it is the known text."""
        known = self._known(text)
        rest = self._continuation(text[sum(len(stretch.text) for stretch in known) :]) if known else None
        if rest is None:
            known, rest = [], Stretch(text, self._vocabulary.tokenize_rendered(text))
        self._stretches = [*known, rest] if rest.text else known
        return np.concatenate([stretch.tokens for stretch in self._stretches])

    def wrote(self, tokens: Sequence[int]) -> None:
        """Note what the model wrote behind the text last read."""
        for token in tokens:
            self._stretches.append(Stretch(self._vocabulary.piece(token), np.array([token], dtype=np.int32)))

    def _known(self, text: bytes) -> list[Stretch]:
        """The stretches with which a text begins."""
        known: list[Stretch] = []
        end = 0
        for stretch in self._stretches:
            # A token without text, such as a control token, is not part of the text.
            if not (stretch.text and text.startswith(stretch.text, end)):
                break
            known.append(stretch)
            end += len(stretch.text)
        while known and _splits_a_character(text, end):
            end -= len(known.pop().text)
        return known

    def _continuation(self, text: bytes) -> Stretch | None:
        """A text that follows a known one; None where the tokenizer cannot begin there."""
        tokens = self._vocabulary.tokenize(text, add_special=False) if text else NO_TOKENS
        first = self._vocabulary.piece(int(tokens[0])) if len(tokens) else b""
        if self._adds_space and first.startswith(b" "):
            if first != b" ":
                return None
            tokens = tokens[1:]
        return Stretch(text, tokens)


def _splits_a_character(text: bytes, at: int) -> bool:
    """Whether a UTF-8 character goes on at a place."""
    return at < len(text) and text[at] & 0xC0 == 0x80
