"""The part of a sequence that a draft model with hidden rows sees, and its names in a KV cache.

What such a model computes for a token depends on all tokens before it, also on those that it does not see,
because the hidden rows do. tests/llama/test_windows.py.
"""

from __future__ import annotations

import zlib

from llamaspec.values import TokenArray

_MARK = -(1 << 30)  # above are token ids and their complements


def window_keys(tokens: TokenArray, begin: int, n_drafted: int = 0) -> TokenArray:
    """Return the tokens from `begin` on as a KV cache names them: [n - begin].

    The last `n_drafted` ones are complements: an accepted draft token is evaluated again, with the target's
    hidden row. The first one stands for itself and all tokens before it.
    """
    keys = tokens[begin:].copy()
    if n_drafted:
        keys[-n_drafted:] = ~keys[-n_drafted:]
    if begin and len(keys):
        keys[0] = _MARK - (zlib.crc32(tokens[: begin + 1].tobytes()) >> 3)
    return keys
