"""`POST /v1/responses`: OpenAI's newer API, without its memory: a request brings its whole conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llamaspec.chat.message import Message
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.completions import ResponseFormat
from llamaspec.serve.constraints import Shape
from llamaspec.serve.conversations import (
    MAX_MESSAGES,
    CallFields,
    Content,
    FunctionFields,
    MessageFields,
    Role,
    conversation,
    function_tool,
    text_of,
)
from llamaspec.serve.deltas import Deltas, End, Said, Silence, Whole
from llamaspec.serve.faults import RequestError, fault_of, not_supported, openai_error
from llamaspec.serve.fields import Count, Fields, SamplingFields, refuse_unsupported
from llamaspec.serve.figures import figures
from llamaspec.serve.questions import MAX_TOOLS, Effort, Question, ThinkingFields, ToolName, ToolUse
from llamaspec.serve.response_items import Items, whole_items
from llamaspec.serve.service import Service, body_of
from llamaspec.serve.sse import comment, event


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
    """How the answer is written."""

    format: ResponseFormat | None = None


class Tool(Fields):
    """A function that the model may want called."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Fields):
    """Names a function."""

    type: Literal["function"]
    name: str


class ReasoningFields(Fields):
    """How much the model thinks before it answers."""

    effort: Effort | None = None


class ResponsesRequest(SamplingFields, ThinkingFields):
    """A conversation to answer."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    text: TextFields | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None

    def question(self, *, takes_tools: bool) -> Question:
        """What the model is asked."""
        if isinstance(self.input, str):
            messages = conversation(
                [MessageFields(role="user", content=self.input)], "input", takes_tools=takes_tools
            )
        else:
            asked, places = _messages(self.input)
            messages = conversation(asked, "input", takes_tools=takes_tools, fields=places)
        system = [Message("system", self.instructions)] if self.instructions else []
        effort = None if self.reasoning is None else self.reasoning.effort
        return Question([*system, *messages], "input", self._tool_use(), self.thinking(effort), self._shape())

    @property
    def n_logprobs(self) -> int | None:
        """How many tokens are told with each token; None: nothing is."""
        is_wanted = self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())
        return self.top_logprobs or 0 if is_wanted else None

    def _shape(self) -> Shape | None:
        text_format = None if self.text is None else self.text.format
        return None if text_format is None else text_format.shape("text.format")

    def _tool_use(self) -> ToolUse:
        tools, choice = self.tools or [], self.tool_choice or "auto"
        for i, tool in enumerate(tools):
            if tool.type != "function":
                raise not_supported(f"tools.{i}.type", "this server has no tools of its own")
            if tool.name is None:
                raise RequestError(400, f"tools.{i}.name: is missing", field=f"tools.{i}.name")
        return ToolUse(
            tools=[function_tool(tool.name or "", tool.description, tool.parameters) for tool in tools],
            choice=choice if isinstance(choice, str) else choice.name,
            is_named=not isinstance(choice, str),
            is_parallel=self.parallel_tool_calls is not False,
            is_strict=any(tool.strict for tool in tools),
        )


async def responses(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await body_of(request, ResponsesRequest)
    refuse_unsupported(background=body.background)
    if body.previous_response_id or body.conversation:
        field = "previous_response_id" if body.previous_response_id else "conversation"
        raise not_supported(field, "this server keeps no conversations; send the whole input")
    prompt, manner = await service.asked(body.question(takes_tools=service.prompts.takes_tools))
    seed = body.seed_or_random()
    jobs = service.jobs(
        [prompt],
        body,
        max_tokens=body.max_output_tokens,
        seed=seed,
        manner=manner,
        n_logprobs=body.n_logprobs,
    )
    form = _Form(service.model_name, body, seed, service.pair.target.vocabulary)
    return await service.respond(request, jobs, stream=bool(body.stream), events=form.events, form=form.whole)


def _messages(items: Sequence[InputItem]) -> tuple[list[MessageFields], list[str]]:
    """Items as messages, and where each begins: reasoning, text and calls of one answer are one message."""
    found: list[MessageFields] = []
    places: list[str] = []
    for i, item in enumerate(items):
        place = f"input.{i}"
        message = _message(item, place)
        last = found[-1] if found else None
        is_same = last is not None and last.role == message.role == "assistant" and not last.tool_calls
        if item.type == "function_call" and last is not None and last.role == "assistant":
            last.tool_calls = [*(last.tool_calls or []), *(message.tool_calls or [])]
        elif is_same and last is not None and last.content is None and last.reasoning_content:
            last.content = message.content
        else:
            found.append(message)
            places.append(place)
    return found, places


def _message(item: InputItem, place: str) -> MessageFields:
    kind = item.type or "message"
    if kind == "message":
        if item.role is None:
            raise RequestError(400, f"{place}.role: is missing", field=f"{place}.role")
        return MessageFields(role=item.role, content=item.content)
    if kind == "reasoning":
        thought = text_of(item.content or item.summary, f"{place}.content")
        return MessageFields(role="assistant", reasoning_content=thought)
    if kind not in ("function_call", "function_call_output"):
        raise not_supported(f"{place}.type", "only messages, reasoning and calls of functions are supported")
    if item.call_id is None:
        raise RequestError(400, f"{place}.call_id: is missing", field=f"{place}.call_id")
    if kind == "function_call_output":
        return MessageFields(role="tool", content=item.output, tool_call_id=item.call_id)
    if item.name is None:
        raise RequestError(400, f"{place}.name: is missing", field=f"{place}.name")
    function = FunctionFields(name=item.name, arguments=item.arguments or "{}")
    return MessageFields(role="assistant", tool_calls=[CallFields(id=item.call_id, function=function)])


class _Form:
    """The response object and its events."""

    def __init__(
        self, model: str, body: ResponsesRequest, seed: int, vocabulary: LlamaVocabulary | None = None
    ) -> None:
        sampling, self._with_rounds = body.sampling(), body.wants_rounds
        self._vocabulary = None if body.n_logprobs is None else vocabulary
        echoed = body.model_dump(
            include={"tools", "tool_choice", "reasoning", "text"}, exclude_none=True, by_alias=True
        )
        text = {"format": {"type": "text"}, **echoed.get("text", {})}
        self._head: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "seed": seed,
            "store": False,
            "temperature": sampling.temperature,
            "text": text,
            "tool_choice": echoed.get("tool_choice", "auto"),
            "tools": echoed.get("tools", []),
            "reasoning": echoed.get("reasoning"),
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "truncation": "disabled",
        }
        self._number = 0  # of the next event

    def whole(self, rows: Sequence[Whole]) -> dict[str, Any]:
        """The answer as one object."""
        end = rows[0].end
        status = "incomplete" if end.is_cut else "completed"
        return self._ended(whole_items(rows[0], status, self._vocabulary), end)

    async def events(self, of: Deltas) -> AsyncIterator[bytes]:
        """The answer as it is made."""
        begun = self._response("in_progress", [])
        yield self._event({"type": "response.created", "response": begun})
        yield self._event({"type": "response.in_progress", "response": begun})
        items = Items(self._vocabulary)
        try:
            async for _, delta in of:
                if isinstance(delta, Silence):
                    yield comment(delta)
                    continue
                for data in self._data(delta, items):
                    yield self._event(data)
        except Exception as error:  # noqa: BLE001  # the client is told
            fault = openai_error(fault_of(error))["error"]
            failed = self._response("failed", items.done)
            failed["error"] = {"code": fault["code"] or fault["type"], "message": fault["message"]}
            yield self._event({"type": "response.failed", "response": failed})

    def _data(self, delta: Said | End, items: Items) -> list[dict[str, Any]]:
        if not isinstance(delta, End):
            return items.say(delta)
        last = items.finish("incomplete" if delta.is_cut else "completed")
        response = self._ended(items.done, delta)
        return [*last, {"type": f"response.{response['status']}", "response": response}]

    def _ended(self, output: list[dict[str, Any]], end: End) -> dict[str, Any]:
        response = self._response("incomplete" if end.is_cut else "completed", output)
        done = end.completion
        n_prompt, n_written = done.n_prompt_tokens, done.summary.n_tokens
        response["incomplete_details"] = {"reason": "max_output_tokens"} if end.is_cut else None
        response["usage"] = {
            "input_tokens": n_prompt,
            "input_tokens_details": {"cached_tokens": done.n_cached, "cache_write_tokens": 0},
            "output_tokens": n_written,
            "output_tokens_details": {"reasoning_tokens": end.n_thought},
            "total_tokens": n_prompt + n_written,
        }
        return {**response, **figures(end, self._with_rounds)}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        empty = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": output, **empty}

    def _event(self, data: dict[str, Any]) -> bytes:
        self._number += 1
        return event({**data, "sequence_number": self._number - 1}, data["type"])
