"""What `scripts/interop.py` asks with the `anthropic` package."""

from __future__ import annotations

import sys
from typing import Any

import anthropic

from interop_parts.checks import ADD, ASKED, PIXEL, expect, run

client: Any = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
USER = [{"role": "user", "content": ASKED}]
TOOL = {"name": "add", "description": ADD["description"], "input_schema": ADD["parameters"]}
ASK: dict[str, Any] = {"model": "any", "messages": USER, "max_tokens": 48, "extra_body": {"seed": 1}}
CALL = {
    "tools": [TOOL],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "max_tokens": 200,
    "thinking": {"type": "disabled"},
}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def messages_whole_and_streamed() -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    whole = client.messages.create(**ASK, system=system)
    with client.messages.stream(**ASK, system=system) as stream:
        streamed = stream.get_final_message()
    expect(text_of(streamed) == text_of(whole), "the stream is another text")
    expect(whole.usage.output_tokens > 0, "no usage")


def tools_whole_and_streamed() -> None:
    call = client.messages.create(**{**ASK, **CALL}).content[0]
    expect(set(call.input) == {"a", "b"}, "the input is not of the schema")
    with client.messages.stream(**{**ASK, **CALL}) as stream:
        final = stream.get_final_message()
    expect(final.stop_reason == "tool_use", f"stop_reason {final.stop_reason}")
    expect(final.content[0].input == call.input, "the stream calls otherwise")
    parts = [{"type": "text", "text": "not "}, {"type": "text", "text": "found"}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": parts, "is_error": True}
    asked = [
        *USER,
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [result]},
    ]
    client.messages.create(**{**ASK, "messages": asked}, tools=[TOOL])


def thinking() -> None:
    budget = {"type": "enabled", "budget_tokens": 1024}
    client.messages.create(**{**ASK, "max_tokens": 1100, "stop_sequences": ["\n"]}, thinking=budget)


def count_tokens() -> None:
    counted = client.messages.count_tokens(model="any", messages=USER, tools=[TOOL]).input_tokens
    expect(
        counted > client.messages.count_tokens(model="any", messages=USER).input_tokens, "tools count nothing"
    )


def image_is_refused() -> None:
    source = {"type": "base64", "media_type": "image/gif", "data": PIXEL.partition(",")[2]}
    try:
        client.messages.create(
            **{**ASK, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
        )
    except anthropic.BadRequestError as error:
        expect("text" in str(error), f"not said why: {error}")
        return
    expect(False, "an image was accepted")


run(messages_whole_and_streamed, tools_whole_and_streamed, thinking, count_tokens, image_is_refused)
