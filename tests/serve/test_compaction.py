"""/v1/responses/compact and /v1/responses/input_tokens, with OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from llamaspec.serve.http_errors import RequestError
from llamaspec.serve.openai_responses import SUMMARY_MARK, ResponsesBody
from patience import PATIENCE
from serving import Served

ASKED: Any = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"type": "function_call", "call_id": "a", "name": "find", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "found"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": [{"type": "input_text", "text": "See "}, {"type": "input_image"}]},
    {"role": "assistant", "content": "I see."},
]
FIND = {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def client(talker: Served) -> Any:
    with openai.OpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as it:
        yield it


def test_a_compacted_conversation_comes_back(client: Any, talker: Served) -> None:
    """Once, the items were dropped in silence. A second summary replaces the first."""
    before = len(talker.log)
    compacted = client.responses.compact(model="any", input=ASKED, instructions="I", extra_body={"seed": 1})
    *kept, item = compacted.output
    assert [message.content[0].text for message in kept] == ["Hi", "See [input_image left out: not text]"]
    assert (item.type, compacted.object) == ("compaction", "response.compaction")
    assert item.encrypted_content.startswith(SUMMARY_MARK)
    summary = item.encrypted_content.removeprefix(SUMMARY_MARK)
    assert compacted.usage.output_tokens > 1
    more = [
        *(each.model_dump(exclude_none=True, warnings=False) for each in compacted.output),
        {"role": "user", "content": "Go"},
    ]
    request = ResponsesBody.model_validate({"input": more}).chat_request()
    said = [message.text for message in request.messages]
    assert said[1::2] == ["See [input_image left out: not text]", "Go"]
    assert said[::2] == ["Hi", f"Summary of the conversation so far:\n\n{summary}"]
    assert {message.role for message in request.messages} == {"user"}
    again = client.responses.compact(model="any", input=more, extra_body={"seed": 2, "max_output_tokens": 3})
    assert [each.type for each in again.output] == ["message", "message", "message", "compaction"]
    assert again.usage.output_tokens == 3
    assert not [line for line in talker.log[before:] if "left out" in line]


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary"])
def test_a_summary_of_another_server_is_left_out(kind: str) -> None:
    items = [{"type": kind, "encrypted_content": "gAAA"}, {"role": "user", "content": "Hi"}]
    request = ResponsesBody.model_validate({"input": items}).chat_request()
    assert [message.text for message in request.messages] == ["Hi"]
    assert request.left_out == [f"item {kind}"]
    with pytest.raises(RequestError, match="must not be empty"):
        ResponsesBody.model_validate({"input": items[:1]}).chat_request()


def test_compacting_is_no_stream(talker: Served) -> None:
    answer = talker.post("/v1/responses/compact", {"input": ASKED, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


def test_input_tokens_are_counted(client: Any) -> None:
    """As many as a response has; also more than fit."""
    asked = {"model": "any", "input": "Hi", "instructions": "Be brief.", "tools": [FIND]}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    answer = client.responses.create(**asked, max_output_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens
    assert client.responses.input_tokens.count(model="any", input="a b " * 600).input_tokens > 600
