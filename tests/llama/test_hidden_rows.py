"""The names of tokens in the KV cache of a draft model that reads hidden rows."""

from __future__ import annotations

import numpy as np

from fakes import tokens
from llamaspec.llama.hidden_rows import window_keys


def test_the_whole_sequence_has_its_own_names() -> None:
    assert window_keys(tokens(5, 6, 7), 0).tolist() == [5, 6, 7]
    assert window_keys(tokens(5, 6, 7), 3).tolist() == []


def test_drafted_tokens_have_other_names() -> None:
    assert window_keys(tokens(5, 6, 7), 0, 2).tolist() == [5, ~6, ~7]


def test_the_first_token_stands_for_all_before_it() -> None:
    keys = [
        window_keys(tokens(*before, 7, 8), len(before))
        for before in ((1,), (2,), (1, 2), (2, 1), (0, 1), (0, 0, 1))
    ]
    assert len({int(each[0]) for each in keys}) == len(keys)
    assert all(each[1:].tolist() == [8] for each in keys)
    assert all(each[0] <= -(1 << 30) for each in keys), "neither a token nor the complement of one"
    assert all(each.dtype == np.int32 for each in keys)
    assert window_keys(tokens(1, 7, 8), 1).tolist() == keys[0].tolist()
