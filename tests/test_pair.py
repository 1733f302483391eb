"""The arguments of `Pair.stream`: what they may be, and one clear line if they are something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamaspec import Pair, PromptError

TEXT = "def f(self):"


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.int64)])
def test_token_ids_are_any_sequence_of_whole_numbers(tiny: Pair, kind: Any) -> None:
    ids = tiny.target.vocabulary.tokenize(TEXT.encode())
    expected = tiny.stream(TEXT, seed=1, max_tokens=5).run().tokens
    assert tiny.stream(kind(ids.tolist()), seed=1, max_tokens=5).run().tokens == expected


def test_a_buffer_is_text_and_a_string_is_one_stop(tiny: Pair) -> None:
    """A `bytearray` was taken for token ids."""
    whole = tiny.stream(TEXT, seed=1, max_tokens=20).run()
    for text in (bytearray(TEXT.encode()), memoryview(TEXT.encode())):
        assert tiny.stream(text, seed=1, max_tokens=20, prediction=text).run().tokens == whole.tokens
    stop = whole.text[2:5]
    assert tiny.stream(TEXT, seed=1, max_tokens=20, stops=stop).run().text == whole.text.partition(stop)[0]


@pytest.mark.parametrize(
    ("prompt", "more", "kind", "message"),
    [
        ([{"role": "user", "content": "x"}], {}, TypeError, "not list; for messages, use chat_prompt"),
        ([1.5], {}, TypeError, "a prompt is text, bytes or token ids"),
        (None, {}, TypeError, "a prompt is text, bytes or token ids, not NoneType"),
        ([1 << 40], {}, ValueError, "token ids must be from 0 to"),
        ([-1], {}, ValueError, "token ids must be from 0 to"),
        ([], {}, PromptError, "the prompt is empty; give some text"),
        (b"", {}, PromptError, "the prompt is empty; give some text"),
        (np.ones((2, 2), np.int32), {}, TypeError, "a prompt is text, bytes or token ids"),
        ("a", {"prediction": 5}, TypeError, "a prediction is text, bytes or token ids, not int"),
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
