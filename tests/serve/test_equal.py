"""With drafts and without, a client sees the same answer.

Also if an accepted copy spans the end of the reasoning, the place where the reasoning is cut off, or the
end of a stop string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import jsonschema
import pytest

from llamaspec import FixedLength, Pair
from llamaspec.chat.tool_grammar import answer_grammar
from serve_soak import SCHEMA, TEMPLATE
from serving import Served, served

CHAT = "/v1/chat/completions"
THINKS = {
    "messages": [{"role": "user", "content": "Name a thing."}],
    "enable_thinking": True,
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    "logprobs": True,
    "top_logprobs": 2,
    "max_tokens": 60,
}


@pytest.fixture(scope="module")
def brief(demo: Pair) -> Iterator[Served]:
    """A server with drafts of eight tokens, whose model is forced to reason briefly."""

    def short(*args: Any, **options: Any) -> str:
        grammar = answer_grammar(*args, **options)
        return grammar.replace("(?s:.*)", "[a-z ]{4,12}").replace(" SPACE? ", " ")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamaspec.serve.constraints.answer_grammar", short)
        with served(demo, FixedLength(8), template=TEMPLATE) as running:
            yield running


def seen(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of an answer that must not depend on drafts."""
    (choice,), usage = answer["choices"], answer["usage"]
    details = usage["completion_tokens_details"]
    counts = {key: value for key, value in usage.items() if isinstance(value, int)}
    return {**choice, **counts, "reasoning_tokens": details["reasoning_tokens"]}


@pytest.mark.parametrize(
    ("more", "border"),
    [
        ({}, "reasoning_tokens"),
        ({"thinking_budget_tokens": 2}, "reasoning_tokens"),
        ({"stop": "size"}, "completion_tokens"),
        ({"stop": "think"}, "completion_tokens"),
    ],
    ids=["reasoning ends", "reasoning is cut", "stop in the answer", "stop in a mark"],
)
def test_a_copy_across_a_border(brief: Served, more: dict[str, Any], border: str) -> None:
    n_across = 0
    for seed in range(6):
        asked = {**THINKS, "seed": seed, "speculative": {"enabled": False}}
        whole = brief.post(CHAT, asked).json()["choices"][0]["message"]
        plain = brief.post(CHAT, {**asked, **more}).json()
        copied = {"type": "content", "content": f"{whole['reasoning_content']}</think>{whole['content']}"}
        drafts = {"prediction": copied, "speculative": {"rounds": True}}
        answer = brief.post(CHAT, {**asked, **more, **drafts}).json()
        assert seen(answer) == seen(plain)
        if answer["choices"][0]["finish_reason"] == "stop" and "stop" not in more:
            jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA)
        accepted = [each["accepted"] for each in answer["rounds"]]
        begins = accumulate((n + 1 for n in accepted), initial=0)
        n_across += any(
            begin < seen(plain)[border] < begin + n for begin, n in zip(begins, accepted, strict=False)
        )
    assert n_across
