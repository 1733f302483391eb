"""`POST /v1/responses`: OpenAI's newer API, stateless: each request brings its whole conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llamaspec.chat.parse import ArgumentsDelta, CallDelta, ReasoningDelta
from llamaspec.chat.template import Message
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CallFields,
    Content,
    Count,
    Effort,
    Fields,
    FunctionFields,
    MessageFields,
    Role,
    SamplingFields,
    TopLogprobs,
    bad_field,
    conversation,
    not_supported,
    openai_error,
    required,
    text_of,
)
from llamaspec.serve.deltas import Answer, Deltas, TextDelta, figures, logprob_list
from llamaspec.serve.deltas import Content as ContentText
from llamaspec.serve.openai_chat import ResponseFormatFields
from llamaspec.serve.requests import ChatRequest, ReasoningFields, ToolChoiceFields, ToolFields, tool_use
from llamaspec.serve.scheduling import Finished, PromptProgress
from llamaspec.serve.service import comment, event, parse_body, service_of

Data = dict[str, Any]


class InputItem(Fields):
    """A message, or another item of a conversation."""

    type: str | None = None
    role: Role | None = None
    content: Content | None = None
    call_id: str | None = None  # of function_call and function_call_output
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: Content | None = None  # of reasoning


class TextFields(Fields):
    """What the text must match."""

    format: ResponseFormatFields | None = None


class EffortFields(Fields):
    """How much the model reasons before it answers."""

    effort: Effort | None = None


class ResponsesBody(SamplingFields, ReasoningFields):
    """A conversation to answer."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    text: TextFields | None = None
    tools: Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ToolChoiceFields | None = None
    parallel_tool_calls: bool | None = None
    reasoning: EffortFields | None = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None

    def chat_request(self, *, takes_tools: bool) -> ChatRequest:
        """What the model is asked."""
        asked = self.input
        items = [InputItem(role="user", content=asked)] if isinstance(asked, str) else asked
        messages = conversation(_messages(items), takes_tools=takes_tools)
        system = [Message("system", self.instructions)] if self.instructions else []
        text_format = None if self.text is None else self.text.format
        return ChatRequest(
            [*system, *messages],
            "input",
            tool_use(self.tools, self.tool_choice, self.parallel_tool_calls),
            self.reasoning_options(None if self.reasoning is None else self.reasoning.effort),
            next(iter([] if text_format is None else text_format.response_format("text.format")), None),
        )

    @property
    def n_logprobs(self) -> int | None:
        """The most probable tokens that are told with each token; None: no log-probabilities."""
        is_wanted = self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())
        return self.top_logprobs or 0 if is_wanted else None


def _messages(items: Sequence[InputItem]) -> list[tuple[str, MessageFields]]:
    """Items as messages: reasoning, text and calls of one answer become one message."""
    if not items:
        raise bad_field("input", "must not be empty")
    found: list[tuple[str, MessageFields]] = []
    for i, item in enumerate(items):
        message = _message(item, f"input.{i}")
        last = found[-1][1] if found and found[-1][1].role == "assistant" else None
        if last is not None and item.type == "function_call":
            last.tool_calls = [*(last.tool_calls or []), *(message.tool_calls or [])]
        elif (
            last is not None
            and message.role == "assistant"
            and last.reasoning_content
            and last.content is None
            and not last.tool_calls
        ):
            last.content = message.content
        else:
            found.append((f"input.{i}", message))
    return found


def _message(item: InputItem, place: str) -> MessageFields:
    kind = item.type or "message"
    if kind == "message":
        if item.role is None:
            raise bad_field(f"{place}.role", "is missing")
        return MessageFields(role=item.role, content=item.content)
    if kind == "reasoning":
        reasoning = text_of(item.content or item.summary, f"{place}.content")
        return MessageFields(role="assistant", reasoning_content=reasoning)
    if kind not in ("function_call", "function_call_output"):
        raise not_supported(f"{place}.type", "only messages, reasoning and calls of functions are supported")
    call_id = required(item.call_id, f"{place}.call_id")
    if kind == "function_call_output":
        return MessageFields(role="tool", content=item.output, tool_call_id=call_id)
    function = FunctionFields(name=required(item.name, f"{place}.name"), arguments=item.arguments)
    return MessageFields(role="assistant", tool_calls=[CallFields(id=call_id, function=function)])


async def responses(http: Request) -> Response:
    """Answer a conversation."""
    service, body = service_of(http), await parse_body(http, ResponsesBody)
    if body.background:
        raise not_supported("background")
    for field in ("previous_response_id", "conversation"):
        if getattr(body, field):
            raise not_supported(field, "this server keeps no conversations; send the whole input")
    builder, seed = service.builder, body.seed_or_random()
    prompt, parameters = await builder.chat(body.chat_request(takes_tools=builder.takes_tools))
    requests = builder.requests(
        [prompt], body, parameters, seed, max_tokens=body.max_output_tokens, n_logprobs=body.n_logprobs
    )
    form = ResponsesForm(service.model_name, seed, body, builder.vocabulary)
    return await service.respond(http, requests, form, body.stream)


class ResponsesForm:
    """The response object and its events."""

    def __init__(self, model: str, seed: int, body: ResponsesBody, vocabulary: LlamaVocabulary) -> None:
        self._with_rounds = bool(body.drafting.rounds)
        self._items = OutputItems(None if body.n_logprobs is None else vocabulary)
        sampling = body.sampling()
        echoed = {"tools", "tool_choice", "reasoning", "text", "instructions", "metadata"}
        self._head: Data = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "seed": seed,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "store": False,
            "temperature": sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "tools": [],
            "tool_choice": "auto",
            "metadata": {},
            "max_output_tokens": body.max_output_tokens,
            **body.model_dump(include=echoed, exclude_none=True, by_alias=True),
        }
        self._n_events = 0

    def whole(self, answers: Sequence[Answer]) -> Data:
        """The response object."""
        message = answers[0].message
        deltas: list[TextDelta] = [ReasoningDelta(message.reasoning)] if message.reasoning else []
        if message.text or not (message.reasoning or message.tool_calls):
            deltas.append(ContentText(message.text, logprobs=tuple(answers[0].logprobs)))
        for i, call in enumerate(message.tool_calls):
            deltas += [CallDelta(i, call.id, call.name), ArgumentsDelta(i, call.arguments)]
        for delta in deltas:
            self._items.add(delta)
        return self._last(answers[0].end)[-1]["response"]  # type: ignore[no-any-return]

    async def events(self, deltas: Deltas) -> AsyncIterator[bytes]:
        """The response as events."""
        begun = self._response("in_progress")
        yield self._event({"type": "response.created", "response": begun})
        yield self._event({"type": "response.in_progress", "response": begun})
        try:
            async for _, delta in deltas:
                if isinstance(delta, PromptProgress):
                    yield comment(delta)
                    continue
                last = isinstance(delta, Finished)
                for data in self._last(delta) if last else self._items.add(delta):  # type: ignore[arg-type]
                    yield self._event(data)
        except Exception as exception:  # noqa: BLE001  # the client is told
            error = openai_error(exception)["error"]
            told = {"code": error["code"] or error["type"], "message": error["message"]}
            failed = {**self._response("failed"), "error": told}
            yield self._event({"type": "response.failed", "response": failed})

    def _last(self, end: Finished) -> list[Data]:
        """The events that end the last item and the response."""
        status = "incomplete" if end.is_truncated else "completed"
        events = self._items.finish(status)
        response, done = self._response(status), end.completion
        response["incomplete_details"] = {"reason": "max_output_tokens"} if end.is_truncated else None
        response["usage"] = {
            "input_tokens": done.n_prompt_tokens,
            "input_tokens_details": {"cached_tokens": done.n_cached, "cache_write_tokens": 0},
            "output_tokens": done.summary.n_tokens,
            "output_tokens_details": {"reasoning_tokens": end.n_reasoning},
            "total_tokens": done.n_prompt_tokens + done.summary.n_tokens,
        }
        response |= figures(end, self._with_rounds)
        return [*events, {"type": f"response.{status}", "response": response}]

    def _response(self, status: str) -> Data:
        empty = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": self._items.done.copy(), **empty}

    def _event(self, data: Data) -> bytes:
        self._n_events += 1
        return event({**data, "sequence_number": self._n_events - 1}, data["type"])


class OutputItems:
    """Builds the output items of one answer: each is opened, grows, and is closed before the next.

    With a vocabulary, messages carry the log-probabilities of their tokens.
    """

    def __init__(self, vocabulary: LlamaVocabulary | None) -> None:
        self.done: list[Data] = []  # complete items
        self._vocabulary = vocabulary
        self._logprobs: list[Data] = []  # of the open item
        self._item: Data = {"type": None}  # the open item; of type None: there is none
        self._text = ""

    def add(self, delta: TextDelta) -> list[Data]:
        """The events of a delta, without their numbers."""
        if isinstance(delta, CallDelta):
            return self._open("function_call", "fc", call_id=delta.id, name=delta.name, arguments="")
        begun: list[Data] = []
        if isinstance(delta, ArgumentsDelta):
            name = "function_call_arguments"
        elif isinstance(delta, ReasoningDelta):
            name = "reasoning_text"
            if self._item["type"] != "reasoning":
                begun = self._open("reasoning", "rs", content=[], summary=[])
        else:
            name = "output_text"
            if self._item["type"] != "message":
                begun = self._open("message", "msg", content=[], role="assistant")
        self._text += delta.text
        told: Data = {"type": f"response.{name}.delta", "delta": delta.text, **self._place()}
        if isinstance(delta, ContentText):
            vocabulary = self._vocabulary
            told["logprobs"] = [] if vocabulary is None else logprob_list(delta.logprobs, vocabulary)
            self._logprobs += told["logprobs"]
        return [*begun, told]

    def finish(self, status: str) -> list[Data]:
        """The events that close the open item, if there is one."""
        item, text, place = self._item, self._text, self._place()
        if item["type"] is None:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"arguments": text, "name": item["name"], **place}
            events = [{"type": "response.function_call_arguments.done", **done}]
        else:
            part = self._part(text)
            item["content"] = [part]
            logprobs = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            events = [
                {"type": f"response.{part['type']}.done", "text": text, **logprobs, **place},
                {"type": "response.content_part.done", "part": part, **place},
            ]
        events.append({"type": "response.output_item.done", "output_index": len(self.done), "item": item})
        self.done.append(item)
        self._item, self._text, self._logprobs = {"type": None}, "", []
        return events

    def _open(self, kind: str, prefix: str, **fields: Any) -> list[Data]:
        """Close the open item and open another."""
        events = self.finish("completed")
        item_id = f"{prefix}_{secrets.token_hex(12)}"
        self._item = {"type": kind, "id": item_id, "status": "in_progress", **fields}
        index = {"output_index": len(self.done), "item": dict(self._item)}
        events.append({"type": "response.output_item.added", **index})
        if kind != "function_call":
            part = {"type": "response.content_part.added", "part": self._part(""), **self._place()}
            events.append(part)
        return events

    def _part(self, text: str) -> Data:
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _place(self) -> Data:
        place = {"item_id": self._item.get("id"), "output_index": len(self.done)}
        return place if self._item["type"] == "function_call" else {**place, "content_index": 0}
