"""The end of a text that fits a draft's context."""

from __future__ import annotations

from llamaspec.values import TokenArray


def window(path: TokenArray, context_size: int) -> TokenArray:
    """The end of the path that fits a context.

    What is left out grows by half a context at a time: in between, the start stays where it is and
    the KV cache stays useful.
    """
    excess = len(path) - context_size
    if excess <= 0:
        return path
    half = max(1, context_size // 2)
    return path[-(-excess // half) * half :]
