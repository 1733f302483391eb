"""The arguments of `Pair.stream`: what they may be, and one clear line if they are something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamaspec import LlamaspecError, Pair, PromptError

TEXT = "def f(self):"


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.int64)])
def test_token_ids_are_any_sequence_of_whole_numbers(tiny: Pair, kind: Any) -> None:
    ids = tiny.target.vocabulary.tokenize(TEXT.encode())
    expected = tiny.stream(TEXT, seed=1, max_tokens=5).run().tokens
    assert tiny.stream(kind(ids.tolist()), seed=1, max_tokens=5).run().tokens == expected


@pytest.mark.parametrize(
    ("prompt", "more", "kind", "message"),
    [
        ([{"role": "user", "content": "x"}], {}, TypeError, "not list; for messages, use chat_prompt"),
        ([1.5], {}, TypeError, "a prompt is text, bytes or token ids"),
        (None, {}, TypeError, "a prompt is text, bytes or token ids, not NoneType"),
        ([1 << 40], {}, ValueError, "token ids must be from 0 to"),
        ([-1], {}, ValueError, "token ids must be from 0 to"),
        ([], {}, LlamaspecError, "the prompt is empty"),
        ("a\ud800", {}, PromptError, "the prompt is not UTF-8"),
        ("a", {"max_tokens": "5"}, TypeError, "max_tokens must be a whole number, got '5'"),
        ("a", {"seed": 1.5}, TypeError, "seed must be a whole number, got 1.5"),
        ("a", {"sampling": {"temperature": 0}}, TypeError, "sampling must be a Sampling"),
    ],
)
def test_what_an_argument_cannot_be(
    tiny: Pair, prompt: Any, more: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        tiny.stream(prompt, **more)
