"""What `scripts/interop.py` asks with LangChain."""

from __future__ import annotations

import sys
from typing import Any

from langchain_openai import ChatOpenAI

from interop_parts.checks import ADD, ASKED, SCHEMA, expect, run

ASK: dict[str, Any] = {"model": "any", "api_key": "none", "base_url": f"{sys.argv[1]}/v1", "seed": 1}
ASK |= {"timeout": 120, "max_retries": 0}
model = ChatOpenAI(**ASK, max_tokens=48)


def invoke_and_stream() -> None:
    whole = model.invoke(ASKED).content
    expect(
        "".join(str(chunk.content) for chunk in model.stream(ASKED)) == whole, "the stream is another text"
    )


def bind_tools() -> None:
    bound = ChatOpenAI(**ASK, max_tokens=200).bind_tools(
        [{"type": "function", "function": ADD}], tool_choice="any"
    )
    (call, *_) = bound.invoke(ASKED).tool_calls
    expect(set(call["args"]) == {"a", "b"}, "arguments are not those of the schema")
    whole: Any = None
    for chunk in bound.stream(ASKED):
        whole = chunk if whole is None else whole + chunk
    expect(whole.tool_calls[0]["args"] == call["args"], "the stream calls otherwise")


def structured_output() -> None:
    shape = {"title": "sum", **SCHEMA}
    answer = (
        ChatOpenAI(**ASK, max_tokens=200).with_structured_output(shape, method="json_schema").invoke(ASKED)
    )
    expect(set(answer) == {"a", "b"}, f"not of the schema: {answer}")


def responses() -> None:
    more = {name: value for name, value in ASK.items() if name != "seed"}
    expect(bool(ChatOpenAI(**more, max_tokens=48, use_responses_api=True).invoke(ASKED).content), "no text")


run(invoke_and_stream, bind_tools, structured_output, responses)
