"""llama.cpp with as little around it as possible: one sequence, logits at every position.

The reference for faster code and for files that scripts write. It is slow on purpose, and shares nothing with
llamaspec but the start of llama.cpp.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt

from llamaspec.llama import runtime

Logits = npt.NDArray[np.float32]  # [n, V]
N_CTX = 512


class PlainLlama:
    """One model and one context. Close it, or use it in a `with` block.

    Raises
    ------
    ValueError
        llama.cpp refuses the file or the context.
    """

    def __init__(self, path: Path) -> None:
        runtime.start()
        runtime.log.errors.clear()
        loading = lib.llama_model_default_params()
        loading.use_extra_bufts = runtime.repacking_is_safe()
        self.model = lib.llama_model_load_from_file(os.fsencode(path), loading)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}: {runtime.log.reason}")
        options = lib.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = N_CTX
        options.n_threads = options.n_threads_batch = 1
        self.context = lib.llama_init_from_model(self.model, options)
        if not self.context:
            lib.llama_model_free(self.model)
            raise ValueError(f"llama.cpp cannot make a context of {N_CTX} tokens for {path}")
        self.vocabulary = lib.llama_model_get_vocab(self.model)
        self.n_vocabulary = lib.llama_vocab_n_tokens(self.vocabulary)
        self.n_filled = 0
        self._batch = lib.llama_batch_init(N_CTX, 0, 1)

    def __enter__(self) -> PlainLlama:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free everything, in reverse order."""
        lib.llama_batch_free(self._batch)
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)

    def extend(self, tokens: Sequence[int]) -> Logits:
        """Evaluate tokens after those in the KV cache; return their logits, float32 [n, V]."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self.n_filled + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        code = lib.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code} for {len(tokens)} tokens at {self.n_filled}")
        self.n_filled += len(tokens)
        scores = lib.llama_get_logits(self.context)
        return np.ctypeslib.as_array(scores, shape=(len(tokens), self.n_vocabulary)).copy()

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Return the logits at every position of `tokens`, from an empty KV cache: float32 [n, V]."""
        self.clear()
        return self.extend(tokens)

    def clear(self) -> None:
        """Clear the KV cache."""
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        self.n_filled = 0

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """Return `n` greedy tokens after a prompt; an end token does not stop it."""
        scores = self.logits(prompt)[-1]
        found: list[int] = []
        for _ in range(n):
            found.append(int(scores.argmax()))
            scores = self.extend(found[-1:])[-1]
        return found

    def tokenize(self, text: bytes) -> list[int]:
        """Return the token ids of a text, with the special tokens that the model adds."""
        room = 3 * len(text) + 8  # an invalid byte becomes a character of 3 bytes
        tokens = (lib.llama_token * room)()
        n = lib.llama_tokenize(self.vocabulary, text, len(text), tokens, room, True, False)
        return list(tokens[:n])

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token."""
        buffer = ctypes.create_string_buffer(256)
        n = lib.llama_token_to_piece(self.vocabulary, token, buffer, 256, 0, False)
        return buffer.raw[: max(n, 0)]
