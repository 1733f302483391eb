"""A session of an agent, in the APIs that agents use: from its second turn on, only new tokens are processed.

The client sends the model's answers back as it received them, with calls and their arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamaspec import ModelOptions, open_pair
from serving import Served, served

CHATML = (  # turns as in Qwen2.5's template, spelled with letters that the embedded pair knows
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "# {{ m.role }}{% if m.content %}\n{{ m.content }}{% endif %}"
    "{% if loop.first and tools %}\n# Tools{% for t in tools %}\n{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}\n# end\n{% endfor %}# assistant\n"
)
SYSTEM = "You are a coding agent. Look before you edit, and run the tests.\n" * 8
PLACE = {"path": {"enum": ["a.py", "b.py"]}, "line": {"enum": [1, 20, 300]}}
SCHEMA = {"type": "object", "properties": PLACE, "required": ["path", "line"], "additionalProperties": False}
N_TURNS = 10
Turn = tuple[int, int, int]  # tokens of the prompt, cached tokens, tokens of the answer


@pytest.fixture(scope="module")
def server(demo_files: tuple[Path, Path]) -> Iterator[Served]:
    options = ModelOptions(n_ctx=4096, n_cells=8192, threads=1)
    with (
        open_pair(*demo_files, target_options=options, draft_options=options) as pair,
        served(pair, template=CHATML) as running,
    ):
        yield running


def result(turn: int) -> str:
    return f"line {turn}: def f{turn}(x):\n    return x + {turn}\n" * 2


def responses(server: Served) -> Iterator[Turn]:
    tools = [{"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA},
             {"type": "web_search"}]  # fmt: skip
    items: list[Any] = [{"type": "message", "role": "developer", "content": "Be brief."},
                        {"type": "message", "role": "user", "content": "Mend f."}]  # fmt: skip
    for turn in range(N_TURNS):
        body = {"instructions": SYSTEM, "input": items, "tools": tools, "tool_choice": forced(turn), **USUAL,
                "max_output_tokens": 60, "store": False, "prompt_cache_key": "1"}  # fmt: skip
        answer = server.post("/v1/responses", body).json()
        usage = answer["usage"]
        yield usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
        items += answer["output"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        items += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": result(turn)}
            for call in calls
        ]
        if not calls:
            items.append({"type": "message", "role": "user", "content": result(turn)})


def messages(server: Served) -> Iterator[Turn]:
    """As Claude Code: the first block of the system prompt changes with each request."""
    tools = [{"name": "read", "description": "Reads.", "input_schema": SCHEMA}]
    talk: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Mend f."}]}]
    for turn in range(N_TURNS):
        header = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={turn:05x};"
        system = [{"type": "text", "text": header},
                  {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]  # fmt: skip
        choice = {"type": "any" if forced(turn) == "required" else "auto", "disable_parallel_tool_use": True}
        body = {"system": system, "messages": talk, "tools": tools, "tool_choice": choice, "max_tokens": 60,
                "thinking": {"type": "disabled"}, "context_management": {"edits": []}, **USUAL}  # fmt: skip
        beta = {"anthropic-beta": "claude-code-20250219,some-later-one", "anthropic-version": "2023-06-01"}
        answer = server.post("/v1/messages?beta=true", body, headers=beta).json()
        usage = answer["usage"]
        n_cached = usage["cache_read_input_tokens"]
        yield usage["input_tokens"] + n_cached, n_cached, usage["output_tokens"]
        counted = server.post("/v1/messages/count_tokens?beta=true", body, headers=beta).json()
        assert counted == {"input_tokens": usage["input_tokens"] + n_cached}
        talk.append({"role": "assistant", "content": answer["content"]})
        calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        told = [{"type": "text", "text": result(turn)}]
        parts = [{"type": "tool_result", "tool_use_id": call, "content": told} for call in calls]
        talk.append({"role": "user", "content": parts or told})


USUAL: dict[str, Any] = {"temperature": 0.0, "seed": 1, "parallel_tool_calls": False}


def forced(turn: int) -> str:
    """Force a call in two of three turns."""
    return "auto" if turn % 3 == 2 else "required"


@pytest.mark.parametrize("session", [responses, messages])
def test_ten_turns(server: Served, session: Callable[[Served], Iterator[Turn]]) -> None:
    server.service.pair.forget()
    turns = list(session(server))
    assert len(turns) == N_TURNS
    for (n_before, _, n_answer), (n_prompt, n_cached, _) in itertools.pairwise(turns):
        # The last token of an answer was drawn, but not evaluated.
        assert n_before + n_answer - 1 <= n_cached < n_prompt
