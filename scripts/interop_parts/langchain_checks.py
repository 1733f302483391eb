"""What `scripts/interop.py` asks with LangChain, in an environment of its own: a JSON line for each check."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI

ASKED = "Add 20 and 22."
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "enum": [20, 21]}, "b": {"type": "integer", "enum": [22]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA}
ASK: dict[str, Any] = {"model": "any", "api_key": "none", "base_url": f"{sys.argv[1]}/v1", "seed": 1}
ASK |= {"timeout": 120, "max_retries": 0}
model = ChatOpenAI(**ASK, max_tokens=48)


def invoke_and_stream() -> bool:
    parts = [str(chunk.content) for chunk in model.stream(ASKED)]
    return bool("".join(parts) == model.invoke(ASKED).content)


def bind_tools() -> bool:
    """Whole and streamed, the same call is read."""
    tools = [{"type": "function", "function": ADD}]
    bound = ChatOpenAI(**ASK, max_tokens=200).bind_tools(tools, tool_choice="any")
    (call, *_) = bound.invoke(ASKED).tool_calls
    whole: Any = None
    for chunk in bound.stream(ASKED):
        whole = chunk if whole is None else whole + chunk
    return set(call["args"]) == {"a", "b"} and whole.tool_calls[0]["args"] == call["args"]


def structured_output() -> bool:
    shaped = ChatOpenAI(**ASK, max_tokens=200)
    shaped = shaped.with_structured_output({"title": "sum", **SCHEMA}, method="json_schema")
    return set(shaped.invoke(ASKED)) == {"a", "b"}


def responses() -> bool:
    more = {name: value for name, value in ASK.items() if name != "seed"}
    return bool(ChatOpenAI(**more, max_tokens=48, use_responses_api=True).invoke(ASKED).content)


for check in (invoke_and_stream, bind_tools, structured_output, responses):
    try:
        wrong = "" if check() else "another answer than expected"
    except Exception as error:  # noqa: BLE001  # whatever a client raises is the result
        wrong = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps({"check": check.__name__.replace("_", " "), "wrong": wrong}), flush=True)
