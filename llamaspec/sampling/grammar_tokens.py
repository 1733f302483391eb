"""A vocabulary as llguidance reads it: the bytes of every token, and how a text is split into tokens."""

from __future__ import annotations

import numpy as np

from llamaspec.protocols import SpelledVocabulary
from llamaspec.values import TokenArray

_SPECIAL = b"\xff"  # what llguidance knows special tokens by: no text holds this byte


class GrammarTokens:
    """What llguidance asks of a tokenizer; the names of the attributes are its own.

    Special tokens are allowed only where a grammar names them, as `<|tool_call|>` or by number, `<[151657]>`.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: SpelledVocabulary) -> None:
        self._vocabulary = vocabulary
        tokens, specials = range(vocabulary.size), vocabulary.specials
        self.tokens = [
            _SPECIAL + specials[token] if token in specials else vocabulary.piece(token) for token in tokens
        ]
        self.special_token_ids = sorted(specials)
        self.ends: TokenArray = np.array(vocabulary.ends, dtype=np.int32)
        self.eos_token_id = int(self.ends[0]) if len(self.ends) else 0

    def __call__(self, text: bytes | str) -> list[int]:
        """How the model itself would split a stretch in the middle of a text.

        Some vocabularies put a space before every text. Behind a line break it does no harm, and is cut off.
        """
        wanted = text.encode() if isinstance(text, str) else text
        for before in (b"", b"\n"):
            tokens = self._vocabulary.tokenize(before + wanted, add_special=False).tolist()
            n_missing = sum(map(self._length, tokens)) - len(wanted)
            n = 0
            while n_missing > 0 and n < len(tokens):
                n_missing -= self._length(tokens[n])
                n += 1
            if n_missing == 0:
                return [int(token) for token in tokens[n:]]
        return []

    def _length(self, token: int) -> int:
        return len(self._vocabulary.piece(token))
