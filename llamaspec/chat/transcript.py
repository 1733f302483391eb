"""Keeps the tokens with which a conversation was read and written, so that asking goes on from there.

A tokenizer need not find again the tokens that a model chose to write a text with, and after one that differs
nothing in the KV cache fits. So what is known is not tokenized again. Knows nothing of turns or templates.
tests/chat/test_cached_turns.py measures what is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamaspec.chat.special_tokens import Rendered, Span, SpecialTokens, tokenize
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.values import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Text and the tokens it stands for; it is known as a whole or not at all."""

    text: bytes
    tokens: TokenArray  # [n]
    specials: tuple[Span, ...] = ()  # where control tokens are spelled in the text and were read as such


class Transcript:
    """The tokens of one growing text."""

    def __init__(self, vocabulary: LlamaVocabulary) -> None:
        self._vocabulary = vocabulary
        self._special = SpecialTokens(vocabulary.controls)
        self._controls = {token: text.encode() for text, token in vocabulary.controls.items()}
        self._stretches: list[Stretch] = []
        # SentencePiece vocabularies write a space before every text, also in the middle of one.
        first = vocabulary.tokenize(b"a", add_special=False)[:1].tolist()
        self._adds_space = any(vocabulary.piece(token).startswith(b" ") for token in first)

    @property
    def text(self) -> bytes:
        """All that was read and written."""
        return b"".join(stretch.text for stretch in self._stretches)

    def read(self, rendered: Rendered) -> TokenArray:
        """Tokens of a text, beginning with those known for as long as it is the known text."""
        known = self._known(rendered)
        n_known = sum(len(stretch.text) for stretch in known)
        new = self._continuation(rendered.after(n_known)) if known else None
        if new is None:
            tokens = self._vocabulary.begun(tokenize(rendered, self._vocabulary, self._special))
            known, new = [], Stretch(rendered.text, tokens, rendered.specials)
        self._stretches = [*known, new] if new.text else known
        return np.concatenate([stretch.tokens for stretch in self._stretches])

    def wrote(self, tokens: Sequence[int]) -> None:
        """Note what the model wrote behind the text last read."""
        for token in tokens:
            text = self._vocabulary.piece(token)
            specials: tuple[Span, ...] = ()
            if not text and (text := self._controls.get(token, b"")):  # a template writes it just so
                specials = ((0, len(text)),)
            self._stretches.append(Stretch(text, np.array([token], dtype=np.int32), specials))

    def _known(self, rendered: Rendered) -> list[Stretch]:
        """The stretches with which a text begins."""
        known: list[Stretch] = []
        end = n_specials = 0
        for stretch in self._stretches:
            # A token without text, such as a control token, is not part of the text.
            if not (stretch.text and rendered.text.startswith(stretch.text, end)):
                break
            after = end + len(stretch.text)
            # The same letters with control tokens elsewhere are another text.
            specials = rendered.specials[n_specials:]
            here = [span for span in specials[: len(stretch.specials) + 1] if span[0] < after]
            if here != [(a + end, b + end) for a, b in stretch.specials]:
                break
            known.append(stretch)
            end, n_specials = after, n_specials + len(here)
        while known and _splits_a_character(rendered.text, end):
            end -= len(known.pop().text)
        return known

    def _continuation(self, rendered: Rendered) -> Stretch | None:
        """A text that follows a known one; None where the tokenizer cannot begin there."""
        tokens = tokenize(rendered, self._vocabulary, self._special)
        first = self._vocabulary.piece(int(tokens[0])) if len(tokens) else b""
        if self._adds_space and first.startswith(b" "):
            if first != b" ":
                return None
            tokens = tokens[1:]
        return Stretch(rendered.text, tokens, rendered.specials)


def _splits_a_character(text: bytes, at: int) -> bool:
    """Whether a UTF-8 character goes on at a place."""
    return at < len(text) and text[at] & 0xC0 == 0x80
