"""Text to tokens and back, with the vocabulary inside a model file."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.errors import PromptError
from llamaspec.values import TokenArray


class LlamaVocabulary:
    """The vocabulary of a loaded model; valid while the model is.

    Parameters
    ----------
    model : llama_model pointer
        From `llama_model_load_from_file`.
    """

    def __init__(self, model: Any) -> None:
        self._vocab = lib.llama_model_get_vocab(model)
        self.size: int = lib.llama_vocab_n_tokens(self._vocab)
        self.bos: int = lib.llama_vocab_bos(self._vocab)  # -1 where the model has none
        self.eos: int = lib.llama_vocab_eos(self._vocab)
        self.adds_bos: bool = lib.llama_vocab_get_add_bos(self._vocab)
        self._is_open = True
        self.piece = functools.lru_cache(maxsize=None)(self._piece)
        self.is_end = functools.lru_cache(maxsize=None)(self._is_end)

    def tokenize(self, text: bytes, *, add_special: bool = True) -> TokenArray:
        """Token ids of a UTF-8 text: int32 [n].

        The model's special tokens are recognised in the text, and those it wants at its start are added,
        unless `add_special` is False. Some vocabularies put a space before the text in any case.

        Raises
        ------
        PromptError
            The text is not UTF-8: llama.cpp would replace or refuse it.
        """
        self._check_open()
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PromptError(
                f"the prompt is not UTF-8: byte {error.start} is 0x{text[error.start]:02x}; convert it first"
            ) from error
        tokens = np.empty(len(text) + 8, dtype=np.int32)
        n = lib.llama_tokenize(
            self._vocab,
            text,
            len(text),
            tokens.ctypes.data_as(lib.llama_token_p),
            len(tokens),
            add_special,
            True,
        )
        if n < 0:
            raise PromptError(f"the tokenizer made more tokens than bytes of a prompt of {len(text)} bytes")
        return tokens[:n].copy()

    def tokenize_rendered(self, text: bytes) -> TokenArray:
        """Token ids of what a chat template wrote: begun once, whether or not the template has done it."""
        tokens = self.tokenize(text, add_special=False)
        if not self.adds_bos or self.bos < 0 or tokens[:1].tolist() == [self.bos]:
            return tokens
        return np.concatenate([np.array([self.bos], dtype=np.int32), tokens])

    def text(self, token: int) -> bytes:
        """How the vocabulary itself spells a token."""
        self._check_open()
        return bytes(lib.llama_vocab_get_text(self._vocab, token) or b"")

    def close(self) -> None:
        """Answer no more: the model is about to be freed, and the vocabulary with it."""
        self._is_open = False
        self.piece.cache_clear()
        self.is_end.cache_clear()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("the model is closed")

    def _piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; none for control tokens."""
        self._check_open()
        buffer = ctypes.create_string_buffer(64)
        n = lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
        return buffer.raw[:n]

    def _is_end(self, token: int) -> bool:
        """Whether a token ends the text."""
        self._check_open()
        return bool(lib.llama_vocab_is_eog(self._vocab, token))
