"""The tokens of one growing text, as the model read and generated them.

A tokenizer may split a generated text into other tokens than the model wrote, and the KV cache holds nothing
after the first token that differs. So known text is not tokenized again. tests/chat/test_cached_turns.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamaspec.chat.template import Rendered, Span
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.values import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """Text and its tokens; known text is reused in whole segments."""

    text: bytes
    tokens: TokenArray  # [n]
    specials: tuple[Span, ...] = ()  # control tokens in the text


class Transcript:
    """The tokens of one growing text."""

    def __init__(self, vocabulary: LlamaVocabulary) -> None:
        self._vocabulary = vocabulary
        self._controls = {token: text.encode() for text, token in vocabulary.controls.items()}
        self._segments: list[_Segment] = []
        # SentencePiece puts a space before every text, even before the rest of one.
        first = vocabulary.tokenize(b"a", add_special=False)[:1].tolist()
        self._adds_space = any(vocabulary.piece(token).startswith(b" ") for token in first)

    @property
    def text(self) -> bytes:
        """The whole text, read and generated."""
        return b"".join(segment.text for segment in self._segments)

    def read(self, rendered: Rendered) -> TokenArray:
        """Return the tokens of a text, int32 [n]; its known beginning keeps its tokens."""
        known = self._known(rendered)
        n_known = sum(len(segment.text) for segment in known)
        new = self._continuation(rendered.after(n_known)) if known else None
        if new is None:
            tokens = self._vocabulary.begun(rendered.tokenize(self._vocabulary))
            known, new = [], _Segment(rendered.text, tokens, rendered.specials)
        self._segments = [*known, new] if new.text else known
        return np.concatenate([segment.tokens for segment in self._segments])

    def wrote(self, tokens: Sequence[int]) -> None:
        """Add tokens that the model generated after the text last read."""
        for token in tokens:
            text = self._vocabulary.piece(token)
            specials: tuple[Span, ...] = ()
            if not text and (text := self._controls.get(token, b"")):  # as templates spell it
                specials = ((0, len(text)),)
            self._segments.append(_Segment(text, np.array([token], dtype=np.int32), specials))

    def _known(self, rendered: Rendered) -> list[_Segment]:
        """Return the known segments with which a text begins."""
        known: list[_Segment] = []
        end = n_specials = 0
        for segment in self._segments:
            # A token without text cannot be found in the text.
            if not (segment.text and rendered.text.startswith(segment.text, end)):
                break
            after = end + len(segment.text)
            # The same letters with control tokens at other places are another text.
            specials = rendered.specials[n_specials:]
            here = [span for span in specials[: len(segment.specials) + 1] if span[0] < after]
            if here != [(a + end, b + end) for a, b in segment.specials]:
                break
            known.append(segment)
            end, n_specials = after, n_specials + len(here)
        while known and end < len(rendered.text) and rendered.text[end] & 0xC0 == 0x80:  # within a character
            end -= len(known.pop().text)
        return known

    def _continuation(self, rendered: Rendered) -> _Segment | None:
        """Tokenize a text that follows a known one; None if the tokenizer cannot begin there."""
        tokens = rendered.tokenize(self._vocabulary)
        first = self._vocabulary.piece(int(tokens[0])) if len(tokens) else b""
        if self._adds_space and first.startswith(b" "):
            if first != b" ":
                return None
            tokens = tokens[1:]
        return _Segment(rendered.text, tokens, rendered.specials)
