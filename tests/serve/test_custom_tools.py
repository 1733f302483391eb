"""Custom tools of /v1/responses: Codex's apply_patch is offered, forced, and comes back."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from llamaspec import Pair
from llamaspec.chat.messages import Message, ToolCall
from llamaspec.sampling.lark import lark_pattern
from llamaspec.serve.custom_tools import InputReader, as_arguments, input_schema
from llamaspec.serve.openai_responses import ResponsesBody
from serve_soak import TEMPLATE as TALKER
from serving import Served, served

RESPONSES = "/v1/responses"
# As Codex CLI 0.169.0 has it.
PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
SHORT = 'start: "*** Begin" LF ("+" /[ab"\\\\]{1,3}/ LF)~1..2 "*** End"\n%import common.LF'


def custom(definition: str, syntax: str = "lark", **more: Any) -> dict[str, Any]:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "patch", "description": "Edits files.", "format": form, **more}


def body(*tools: Any, **more: Any) -> dict[str, Any]:
    return {
        "input": "Edit.",
        "tools": list(tools),
        "max_output_tokens": 200,
        "enable_thinking": False,
        **more,
    }


def forced(server: Served, tool: Any, seed: int = 1) -> dict[str, Any]:
    """Return the item of a forced call, whole; its stream has the same."""
    asked = body(tool, tool_choice={"type": "custom", "name": "patch"}, seed=seed)
    (item,) = server.post(RESPONSES, asked).json()["output"]
    events = [data for _, data in server.events(RESPONSES, asked)]
    done = [each for each in events if each["type"] == "response.output_item.done"][-1]["item"]
    assert {**done, "id": "", "call_id": ""} == {**item, "id": "", "call_id": ""}
    parts = [each["delta"] for each in events if each["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(parts) == item["input"]
    assert not [each["type"] for each in events if "function_call" in each["type"]]
    return dict(item)


@pytest.mark.parametrize("marks", ["", "{# <tool_call> <function= <parameter= #}"], ids=["json", "xml"])
def test_the_input_of_a_forced_call_matches_its_grammar(demo: Pair, marks: str) -> None:
    with served(demo, template=marks + TALKER) as server:
        for seed in range(3):
            item = forced(server, custom(SHORT), seed)
            assert (item["type"], item["name"], item["status"]) == ("custom_tool_call", "patch", "completed")
            assert re.fullmatch(lark_pattern(SHORT), item["input"])
        item = forced(server, custom("[ab]{3}|c", "regex"))
        assert re.fullmatch("[ab]{3}|c", item["input"])
        assert not [line for line in server.log if "enforced" in line or "left out" in line]


def test_codexs_grammar_lets_its_patches_pass(demo: Pair) -> None:
    patch = (
        '*** Begin Patch\n*** Add File: hello.txt\n+hello "a" \\ä\n*** Delete File: x\n'
        "*** Update File: a/b.py\n*** Move to: c\n@@ def f():\n-  x\n+  y\n*** End of File\n*** End Patch\n"
    )
    tool = ResponsesBody.model_validate(body(custom(PATCH))).customs["patch"]
    sequence = demo.json_schema(input_schema(tool)).start_sequence()
    for text, is_right in ((patch, True), (patch.replace("+hello", "hello"), False)):
        tokens = demo.target.vocabulary.tokenize(as_arguments(text).encode(), add_special=False)
        assert sequence.is_complete(tokens) is is_right


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        (custom('start: "(" start ")"'), "contains itself"),
        (custom("(?=a)b", "regex"), "properties.input"),
        (custom("x", "peg"), "its syntax is unknown"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_logged(demo: Pair, tool: Any, told: str) -> None:
    with served(demo, template=TALKER) as server:
        item = forced(server, tool)
        assert item["type"] == "custom_tool_call"
        (line,) = [line for line in server.log if "enforced" in line]
        assert "patch" in line
        assert told in line


def test_a_custom_tool_is_offered_and_comes_back() -> None:
    """Without a format, its input is any text. A call of the history is one of the offered function."""
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "a\n"}
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"}
    plain = {"type": "custom", "name": "note", "format": {"type": "text"}}
    request = ResponsesBody.model_validate(
        {**body(custom(SHORT), plain), "input": [call, result]}
    ).chat_request()
    patch, note = (tool["function"] for tool in request.tool_use.offered)
    assert patch["description"].startswith("Edits files.\n\nGive the text as the argument `input`.")
    assert patch["description"].endswith(SHORT)
    assert note["description"] == "Give the text as the argument `input`."
    assert patch["parameters"] == note["parameters"]
    assert "pattern" not in json.dumps(patch)
    assert request.messages == [
        Message("assistant", "", tool_calls=(ToolCall("c", "patch", '{"input": "a\\n"}'),)),
        Message("tool", "Done", name="patch", tool_call_id="c"),
    ]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"input": "a\\n\\u00e4\\ud83d\\ude00\\"b\\\\"}', 'a\nä😀"b\\'),
        ('{ "input" : "cut \\', "cut "),
        ('{"input": "half \\ud83d, \\udc00."}', "half \ufffd, \ufffd."),
        ('{"other": 1}', '{"other": 1}'),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
    ],
)
def test_the_input_is_read_while_it_arrives(arguments: str, found: str) -> None:
    """In parts of any size; arguments that the tool does not have are passed on as they are."""
    for size in range(1, len(arguments) + 1):
        reader = InputReader()
        parts = [reader.feed(arguments[i : i + size]) for i in range(0, len(arguments), size)]
        assert "".join(parts) + reader.finish() == found
