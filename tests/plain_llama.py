"""A model file whose logits are those of whole sequences, for files that scripts and commands write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llamaspec import LlamaModel, ModelOptions
from llamaspec.values import TARGET, ForwardRequest, Logits, TokenArray


class PlainLlama(LlamaModel):
    """A model with lists of tokens instead of requests. Close it, or use it in a `with` block."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ModelOptions(n_ctx=512, threads=1))

    def __enter__(self) -> PlainLlama:
        return self

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Return the logits at every position of `tokens`, from an empty KV cache: float32 [n, V]."""
        self.forget()
        return self.forward(ForwardRequest(TARGET, _array(tokens), n_logits=len(tokens))).copy()

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """Return `n` greedy tokens after a prompt; an end token does not stop it."""
        path = list[int](prompt)
        for _ in range(n):
            path.append(int(self.forward(ForwardRequest(TARGET, _array(path)))[0].argmax()))
        return path[len(prompt) :]

    def tokenize(self, text: bytes) -> list[int]:
        """Return the token ids of a text, with the special tokens that the model adds."""
        tokens: list[int] = self.vocabulary.tokenize(text).tolist()
        return tokens


def _array(tokens: Sequence[int]) -> TokenArray:
    return np.array(tokens, dtype=np.int32)
