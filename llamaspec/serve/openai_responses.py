"""`POST /v1/responses`: OpenAI's newer API, stateless: each request has the whole conversation."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llamaspec.chat.messages import ArgumentsDelta, CallDelta, ContentDelta, Delta, ReasoningDelta
from llamaspec.sampling.filters import Sampling
from llamaspec.serve.bodies import (
    AnswerOptions,
    Effort,
    Fields,
    FieldsByType,
    GenerationBody,
    JsonObject,
    Limit,
    ReasoningFields,
    refused,
)
from llamaspec.serve.constraints import FormatFields, inner_format
from llamaspec.serve.custom_tools import CUSTOM, InputReader, as_arguments, as_function
from llamaspec.serve.http_errors import ContextOverflowError, bad_field, not_supported, openai_error
from llamaspec.serve.jobs import ChatRequest
from llamaspec.serve.message_fields import (
    MAX_MESSAGES,
    CallFields,
    Content,
    CustomFormat,
    FunctionFields,
    MessageFields,
    Result,
    Role,
    ToolChoiceFields,
    ToolFields,
    Tools,
    called,
    conversation,
    parts_of,
    required,
    system_message,
    text_of,
    tool_use,
    without_namespaces,
)
from llamaspec.serve.request_queue import Finished
from llamaspec.serve.response_forms import Data, Form, WholeAnswer, figures, new_id, openai_usage, sse
from llamaspec.serve.service import Endpoint, Service

MAX_METADATA = 1024  # entries

# Items that become tool calls, and their results. Items of other types are left out, such as web searches by
# another server.
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_RESULTS = tuple(f"{kind}_output" for kind in _CALLS)
_COMPACTIONS = ("compaction", "compaction_summary")  # the second is an older name
_MESSAGES = ("message", "item_reference", "reasoning", *_CALLS, *_RESULTS, *_COMPACTIONS)
_ITEMS = (*_MESSAGES, "additional_tools")
SUMMARY_MARK = "llamaspec summary: "  # begins the content of our items of compaction, which is plain text
_SUMMARIZED = "Summary of the conversation so far:\n\n"
_NOT_KEPT = "this server keeps no conversations; send the whole conversation as input"


# Types of items with calls, and what the names of their events have.
_ARGUMENTS = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}


class InputItem(FieldsByType):
    """A message, or another item of a conversation."""

    known = _ITEMS
    type: str | None = None
    id: str | None = None
    role: Role | None = None
    content: Content | None = None
    call_id: str | None = None  # of calls and results
    name: str | None = None
    namespace: str | None = None  # of the tool that is called
    arguments: str | JsonObject | None = None  # of function_call
    input: str | None = None  # of custom_tool_call
    action: JsonObject | None = None  # of local_shell_call
    output: Result | None = None
    summary: Content | None = None  # of reasoning
    encrypted_content: str | None = None  # of compaction
    tools: Tools | None = None  # of additional_tools

    @property
    def own_summary(self) -> str | None:
        """The summary in an item of compaction; None if another server has encrypted it."""
        begin, content = SUMMARY_MARK, self.encrypted_content or ""
        return content.removeprefix(begin) if content.startswith(begin) else None

    @property
    def is_known(self) -> bool:
        """Whether the item can become a part of the conversation."""
        if self.type in _COMPACTIONS:
            return self.own_summary is not None
        return self.type in (None, *_ITEMS)


class EffortFields(Fields):
    """How much the model reasons before it answers."""

    effort: Effort | None = None


class ResponsesBody(GenerationBody, ReasoningFields):
    """A conversation to answer."""

    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    text: FormatFields | None = None
    tools: Tools | None = None
    tool_choice: str | ToolChoiceFields | None = None
    parallel_tool_calls: bool | None = None
    reasoning: EffortFields | None = None
    previous_response_id: Annotated[str | None, refused(_NOT_KEPT)] = None
    conversation: Annotated[str | dict[str, Any] | None, refused(_NOT_KEPT)] = None
    background: Annotated[bool | None, refused()] = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None

    def answer_options(self) -> AnswerOptions:
        """Return the options of its answer."""
        return AnswerOptions(limit=self.max_output_tokens)

    def chat_request(self) -> ChatRequest:
        """Return the conversation to answer."""
        items = self.items
        system = [system_message(self.instructions, "instructions")] if self.instructions else []
        messages = [*system, *(conversation("input", _messages(items)) if items or not system else ())]
        left_out = [f"item {item.type}" for item in items if not item.is_known]
        use = tool_use(list(map(as_function, self.functions[0])), self.tool_choice, self.parallel_tool_calls)
        use = replace(use, customs=self.customs)
        reasoning = self.reasoning_options(None if self.reasoning is None else self.reasoning.effort)
        wanted = inner_format(self.text, "text")
        return ChatRequest(messages, "input", use, reasoning, wanted, left_out)

    @property
    def items(self) -> list[InputItem]:
        """The conversation as items."""
        given = self.input
        return [InputItem(role="user", content=given)] if isinstance(given, str) else given

    @cached_property
    def functions(self) -> tuple[list[ToolFields], dict[str, tuple[str, str]]]:
        """What `without_namespaces` makes of the tools of the request and of its items."""
        more = (tool for item in self.items for tool in item.tools or ())
        return without_namespaces([*(self.tools or ()), *more])

    @cached_property
    def customs(self) -> dict[str, CustomFormat]:
        """The formats of the custom tools, by the model's names for them."""
        tools = self.functions[0]
        return {
            tool.name: tool.format or CustomFormat() for tool in tools if tool.type == CUSTOM and tool.name
        }


def _messages(items: Sequence[InputItem]) -> list[tuple[int, MessageFields]]:
    """Return the messages of items. Reasoning, text and calls of one answer become one message."""
    found: list[tuple[int, MessageFields]] = []
    for i, item in enumerate(items):
        message = _message(item, f"input.{i}") if item.type in (None, *_MESSAGES) else None
        if message is None:
            continue
        last = found[-1][1] if found and found[-1][1].role == "assistant" else None
        may_join = message.role == "assistant" and item.type != "reasoning"
        if last and may_join and (item.type in _CALLS or last.tool_calls or last.content is None):
            last.content = [*parts_of(last.content), *parts_of(message.content)] or None
            last.tool_calls = [*(last.tool_calls or ()), *(message.tool_calls or ())]
        else:
            found.append((i, message))
    return found


def _message(item: InputItem, place: str) -> MessageFields | None:
    """Return the message of an item; None for what is encrypted, and for empty reasoning."""
    kind = item.type or "message"
    if kind == "item_reference":
        raise not_supported(f"{place}.type", _NOT_KEPT)
    if kind == "message":
        if item.role is None:
            raise bad_field(f"{place}.role", "is missing")
        return MessageFields(role=item.role, content=item.content)
    if kind == "reasoning":
        reasoning = text_of(item.content or item.summary, f"{place}.content")
        return MessageFields(role="assistant", reasoning_content=reasoning) if reasoning else None
    if kind in _COMPACTIONS:
        summary = item.own_summary
        return None if summary is None else MessageFields(role="user", content=f"{_SUMMARIZED}{summary}")
    call_id = required(item.call_id or item.id, f"{place}.call_id")
    if kind in _RESULTS:
        return MessageFields(role="tool", content=item.output, tool_call_id=call_id)
    name, arguments = item.name, item.arguments
    if kind == "custom_tool_call":
        arguments = as_arguments(item.input or "")
    elif kind == "local_shell_call":
        name, arguments = "local_shell", json.dumps(item.action or {}, ensure_ascii=False)
    name = called(required(name, f"{place}.name"), item.namespace)
    function = FunctionFields(name=name, arguments=arguments)
    return MessageFields(role="assistant", tool_calls=[CallFields(id=call_id, function=function)])


async def _respond(service: Service, http: Request, body: ResponsesBody) -> Response:
    """Answer a conversation."""
    form = await run_in_threadpool(ResponsesForm, service.model_name, body, service.builder.sampling)
    try:
        prompt = await service.chat(await run_in_threadpool(body.chat_request))
    except ContextOverflowError as error:
        if not body.stream:
            raise
        return form.refusal(error)  # Codex recognizes the error only in a stream, and shortens its history
    return await service.respond(http, body, [prompt], form)


async def _count(service: Service, http: Request, body: ResponsesBody) -> Response:
    """Count the tokens of a conversation."""
    request = await run_in_threadpool(body.chat_request)
    prompt = await service.builder.rendered(request, must_fit=False)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


class ResponsesForm(Form):
    """Writes a response object or its events. An output item grows and closes before the next opens."""

    def __init__(self, model: str, body: ResponsesBody, default: Sampling | None = None) -> None:
        options, sampling = body.chosen_options, body.sampling(default=default)
        self._drafting = options.drafting
        self._namespaces, self._customs = body.functions[1], body.customs
        self._reader = InputReader()  # of the open call of a custom tool
        echoed = {"tools", "tool_choice", "reasoning", "text", "instructions", "metadata"}
        self._head: Data = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "seed": options.seed,
            "store": False,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        }
        self._head |= {"tools": [], "tool_choice": "auto", "metadata": {}}
        self._head |= body.model_dump(include=echoed, exclude_none=True, by_alias=True)
        self._done: list[Data] = []  # closed items
        self._item: Data = {"type": None}  # the open item; type None: there is none
        self._text = ""  # of the open item
        self._numbers = itertools.count()

    def whole(self, answers: Sequence[WholeAnswer]) -> Data:
        """Return the response object."""
        (answer,) = answers
        for delta in answer.deltas or [ContentDelta("")]:
            self._item_events(delta)
        response: Data = self._last_events(answer.end)[-1]["response"]
        return response

    def _begin(self) -> bytes:
        begun = self._response("in_progress")
        return self._events(
            {"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")
        )

    def _add(self, index: int, delta: Delta) -> bytes:
        return self._events(self._item_events(delta))

    def _finish(self, index: int, end: Finished) -> bytes:
        return self._events(self._last_events(end))

    def _error(self, exception: Exception) -> bytes:
        error = openai_error(exception)["error"]
        shown = {"code": error["code"] or error["type"], "message": error["message"]}
        failed = {**self._response("failed"), "error": shown}
        return self._events([{"type": "response.failed", "response": failed}])

    def _events(self, several: Iterable[Data]) -> bytes:
        return b"".join(
            sse({**data, "sequence_number": next(self._numbers)}, data["type"]) for data in several
        )

    def _response(self, status: str) -> Data:
        empty = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": self._done.copy(), **empty}

    def _last_events(self, end: Finished) -> list[Data]:
        """Return the events that end the last item and the response."""
        status = "incomplete" if end.is_truncated else "completed"
        events = self._close(status)
        response = self._response(status) | figures(end, self._drafting)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if end.is_truncated else None
        response["usage"] = openai_usage([end], prompt="input", completion="output")
        response["usage"]["input_tokens_details"]["cache_write_tokens"] = 0
        return [*events, {"type": f"response.{status}", "response": response}]

    def _item_events(self, delta: Delta) -> list[Data]:
        """Return the events of a delta, without their numbers."""
        if isinstance(delta, CallDelta):
            namespace, name = self._namespaces.get(delta.name, (None, delta.name))
            names = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
            if delta.name in self._customs:
                self._reader = InputReader()
                return self._open("custom_tool_call", "ctc", call_id=delta.id, **names, input="")
            return self._open("function_call", "fc", call_id=delta.id, **names, arguments="")
        begun: list[Data] = []
        text = delta.text
        if self._item["type"] == "custom_tool_call" and isinstance(delta, ArgumentsDelta):
            text = self._reader.feed(text)
            if not text:
                return []
        more: Data = {"delta": text}
        if isinstance(delta, ArgumentsDelta):
            more["type"] = f"response.{_ARGUMENTS[self._item['type']]}.delta"
        elif isinstance(delta, ReasoningDelta):
            more["type"] = "response.reasoning_text.delta"
            if self._item["type"] != "reasoning":
                begun = self._open("reasoning", "rs", content=[], summary=[])
        else:
            more |= {"type": "response.output_text.delta", "logprobs": []}
            if self._item["type"] != "message":
                begun = self._open("message", "msg", content=[], role="assistant")
        self._text += text
        return [*begun, more | self._place()]

    def _open(self, kind: str, prefix: str, **fields: Any) -> list[Data]:
        """Close the open item and open another; return the events."""
        events, item_id = self._close("completed"), new_id(f"{prefix}_")
        self._item = {"type": kind, "id": item_id, "status": "in_progress", **fields}
        added = {"item_id": item_id, "output_index": len(self._done), "item": dict(self._item)}
        events.append({"type": "response.output_item.added", **added})
        if kind not in _ARGUMENTS:
            part = {"part": self._part(), **self._place()}
            events.append({"type": "response.content_part.added", **part})
        return events

    def _close(self, status: str) -> list[Data]:
        """Close the open item, if there is one; return the events."""
        item, text, place = self._item, self._text, self._place()
        if item["type"] is None:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"arguments": text, "name": item["name"], **place}
            events = [{"type": "response.function_call_arguments.done", **done}]
        elif item["type"] == "custom_tool_call":
            item["input"] = text = text + self._reader.finish()
            events = [{"type": "response.custom_tool_call_input.done", "input": text, **place}]
        else:
            part = self._part()
            item["content"] = [part]
            logprobs: Data = {"logprobs": []} if item["type"] == "message" else {}
            events = [
                {"type": f"response.{part['type']}.done", "text": text, **logprobs, **place},
                {"type": "response.content_part.done", "part": part, **place},
            ]
        ended = {"item_id": item["id"], "output_index": len(self._done), "item": item}
        events.append({"type": "response.output_item.done", **ended})
        self._done.append(item)
        self._item, self._text = {"type": None}, ""
        return events

    def _part(self) -> Data:
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _place(self) -> Data:
        place = {"item_id": self._item.get("id"), "output_index": len(self._done)}
        return place if self._item["type"] in _ARGUMENTS else {**place, "content_index": 0}


def _failure(model: str, body: ResponsesBody, error: Exception) -> bytes:
    return bytes(ResponsesForm(model, body).refusal(error).body)


ENDPOINTS = (
    Endpoint("/v1/responses", _respond, ResponsesBody, failure=_failure),
    Endpoint("/v1/responses/input_tokens", _count, ResponsesBody),
)
