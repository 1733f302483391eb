"""What `scripts/interop.py` asks with the `openai` package."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

from interop_parts.checks import ADD, ASKED, PIXEL, SCHEMA, expect, run

client: Any = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120)
USER = [{"role": "user", "content": ASKED}]
TOOL = {"type": "function", "function": ADD}
SHAPE = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}


def chat(**more: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "any", "messages": USER, "max_tokens": 48, "seed": 1, **more}
    )


def chat_whole_and_streamed() -> None:
    whole = chat().choices[0]
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(streamed == whole.message.content, "the stream is another text")
    expect(chunks[-1].usage.completion_tokens > 0, "no usage")


def several_choices() -> None:
    expect(len(chat(n=2).choices) == 2, "not two choices")


def tools_whole_and_streamed() -> None:
    forced = {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "reasoning_effort": "none",
    }
    (call, *_) = chat(**forced).choices[0].message.tool_calls
    expect(set(json.loads(call.function.arguments)) == {"a", "b"}, "arguments are not those of the schema")
    with client.chat.completions.stream(model="any", messages=USER, seed=1, **forced) as stream:
        final = stream.get_final_completion().choices[0]
    expect(final.finish_reason == "tool_calls", f"finish_reason {final.finish_reason}")
    expect(
        final.message.tool_calls[0].function.arguments == call.function.arguments,
        "the stream calls otherwise",
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "42"}]}
    chat(messages=[*USER, {"role": "assistant", "tool_calls": [call.model_dump()]}, result], tools=[TOOL])


def json_schema() -> None:
    answer = chat(response_format=SHAPE, max_tokens=200, reasoning_effort="none").choices[0].message.content
    expect(set(json.loads(answer)) == {"a", "b"}, f"not of the schema: {answer}")


def responses_whole_and_streamed() -> None:
    asked = {"model": "any", "input": ASKED, "max_output_tokens": 48, "extra_body": {"seed": 1}}
    whole = client.responses.create(**asked, instructions="Be brief.").output_text
    events = list(client.responses.create(**asked, instructions="Be brief.", stream=True))
    expect(events[-1].response.output_text == whole, "the stream is another text")
    tool = {"type": "function", **ADD, "strict": True}
    called = client.responses.create(
        **{**asked, "max_output_tokens": 200},
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning={"effort": "none"},
    )
    calls = [item for item in called.output if item.type == "function_call"]
    expect(bool(calls), "no call")
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "42"}
    client.responses.create(**{**asked, "input": [*USER, calls[0].model_dump(), result]}, tools=[tool])


def image_is_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    try:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}])
    except openai.BadRequestError as error:
        expect("text" in error.message, f"not said why: {error.message}")
        return
    expect(False, "an image was accepted")


def prediction() -> None:
    text = chat().choices[0].message.content
    again = chat(prediction={"type": "content", "content": text})
    expect(again.choices[0].message.content == text, "the prediction changed the text")


def logprobs() -> None:
    told = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    expect(bool(told) and all(len(each.top_logprobs) == 2 for each in told), "not two for each token")


def models() -> None:
    expect(len(client.models.list().data) == 1, "not one model")


run(
    chat_whole_and_streamed, several_choices, tools_whole_and_streamed, json_schema,
    responses_whole_and_streamed, image_is_refused, prediction, logprobs, models,
)  # fmt: skip
