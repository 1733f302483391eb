"""`POST /v1/messages`: Anthropic's API, which coding agents speak."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llamaspec.chat.answers import CallDelta, ContentDelta, ReasoningDelta
from llamaspec.chat.message import Message
from llamaspec.engine.events import Completion, StopReason
from llamaspec.serve.completions import schema_shape
from llamaspec.serve.constraints import Shape
from llamaspec.serve.conversations import (
    MAX_MESSAGES,
    Content,
    MessageFields,
    conversation,
    function_tool,
    text_of,
)
from llamaspec.serve.deltas import Deltas, End, Said, Silence, Whole
from llamaspec.serve.faults import RequestError, anthropic_error, fault_of, not_supported
from llamaspec.serve.fields import MAX_STOPS, Count, Fields, SamplingFields, StopText
from llamaspec.serve.figures import figures
from llamaspec.serve.questions import MAX_TOOLS, Question, ThinkingFields, ToolName, ToolUse, prompted
from llamaspec.serve.service import Service, body_of
from llamaspec.serve.sse import event

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ThinkingSwitch(Fields):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None


class Tool(Fields):
    """A function that the model may want called."""

    type: str | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Fields):
    """Which tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Fields):
    """What the answer must be."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Fields):
    """How the answer is written."""

    format: OutputFormat | None = None


class CountRequest(ThinkingFields):
    """A conversation whose tokens are to be counted."""

    model: str | None = None
    messages: Annotated[list[MessageFields], Field(max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking_: Annotated[ThinkingSwitch | None, Field(alias="thinking")] = None

    def question(self, shape: Shape | None = None, *, takes_tools: bool) -> Question:
        """What the model is asked."""
        messages = conversation(self.messages, takes_tools=takes_tools)
        if system := text_of(self.system, "system"):
            messages = [Message("system", system), *messages]
        switch = self.thinking_ or ThinkingSwitch(type="adaptive")
        thinking = self.thinking(budget=switch.budget_tokens, off=switch.type == "disabled")
        return Question(messages, tool_use=self._tool_use(), thinking=thinking, shape=shape)

    def _tool_use(self) -> ToolUse:
        tools, choice = self.tools or [], self.tool_choice or ToolChoice(type="auto")
        for i, tool in enumerate(tools):
            if tool.type not in (None, "custom"):
                raise not_supported(f"tools.{i}.type", "this server has no tools of its own")
        if choice.type == "tool" and choice.name is None:
            raise RequestError(400, "tool_choice.name: is missing", field="tool_choice.name")
        return ToolUse(
            tools=[function_tool(tool.name, tool.description, tool.input_schema) for tool in tools],
            choice=choice.name or "" if choice.type == "tool" else _CHOICES[choice.type],
            is_named=choice.type == "tool",
            is_parallel=not choice.disable_parallel_tool_use,
            is_strict=any(tool.strict for tool in tools),
        )


class MessagesRequest(SamplingFields, CountRequest):
    """A conversation to answer."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None

    @property
    def shape(self) -> Shape | None:
        """What the answer must look like."""
        if self.output_config is None or self.output_config.format is None:
            return None
        return schema_shape(self.output_config.format.schema_, "output_config.format")


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await body_of(request, MessagesRequest)
    question = body.question(body.shape, takes_tools=service.prompts.takes_tools)
    prompt, manner = await service.asked(question)
    stops = tuple(body.stop_sequences or ())
    seed = body.seed_or_random()
    jobs = service.jobs([prompt], body, max_tokens=body.max_tokens, stops=stops, seed=seed, manner=manner)
    form = _Form(
        service.model_name, len(prompt), lambda done: service.stop_string(done, stops), body.wants_rounds
    )
    return await service.respond(request, jobs, stream=bool(body.stream), events=form.events, form=form.whole)


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation."""
    service: Service = request.app.state.service
    body = await body_of(request, CountRequest)
    question = body.question(takes_tools=service.prompts.takes_tools)
    tokens, _ = await prompted(question, service.prompts, fits=False)
    return JSONResponse({"input_tokens": len(tokens)})


class _Form:
    """Anthropic's objects for one request."""

    def __init__(
        self,
        model: str,
        n_prompt: int,
        stop_string: Callable[[Completion], str | None],
        with_rounds: bool = False,
    ) -> None:
        self._n_prompt, self._stop_string, self._with_rounds = n_prompt, stop_string, with_rounds
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._block: dict[str, Any] | None = None  # the open content block
        self._n_blocks = 0
        self._has_tools = False

    def whole(self, rows: Sequence[Whole]) -> dict[str, Any]:
        """The answer as one object."""
        said, end = rows[0].message, rows[0].end
        content: list[dict[str, Any]] = []
        if said.reasoning:
            content.append({"type": "thinking", "thinking": said.reasoning, "signature": ""})
        if said.text or not (content or said.tool_calls):
            content.append({"type": "text", "text": said.text})
        for call in said.tool_calls:
            called = {"type": "tool_use", "id": call.id, "name": call.name}
            content.append({**called, "input": _input(call.arguments)})
        self._has_tools = bool(said.tool_calls)
        return {
            **self._head,
            "content": content,
            **self._stop(end),
            "usage": self._usage(end),
            **figures(end, self._with_rounds),
        }

    async def events(self, of: Deltas) -> AsyncIterator[bytes]:
        """The answer as it is made."""
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self._n_prompt, "output_tokens": 0}
        yield _event("message_start", message={**self._head, **empty, "usage": usage})
        try:
            async for _, delta in of:
                if isinstance(delta, Silence):
                    yield _event("ping")
                elif isinstance(delta, End):
                    for part in self._last(delta):
                        yield part
                else:
                    for part in self._said(delta):
                        yield part
        except Exception as error:  # noqa: BLE001  # the client is told
            yield event(anthropic_error(fault_of(error)), "error")

    def _said(self, said: Said) -> list[bytes]:
        """A delta, and the block that it begins."""
        if isinstance(said, CallDelta):
            self._has_tools = True
            block = {"type": "tool_use", "id": said.id, "name": said.name, "input": {}}
            return [*self._close(), self._open(block)]
        if isinstance(said, ContentDelta):
            block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": said.text}
        elif isinstance(said, ReasoningDelta):
            block = {"type": "thinking", "thinking": "", "signature": ""}
            delta = {"type": "thinking_delta", "thinking": said.text}
        else:
            block, delta = self._block or {}, {"type": "input_json_delta", "partial_json": said.text}
        begun: list[bytes] = []
        if self._block is None or self._block["type"] != block["type"]:
            begun = [*self._close(), self._open(block)]
        return [*begun, _event("content_block_delta", index=self._n_blocks - 1, delta=delta)]

    def _last(self, end: End) -> list[bytes]:
        begun = [] if self._n_blocks else [self._open({"type": "text", "text": ""})]
        told = figures(end, self._with_rounds)
        stop = _event("message_delta", delta=self._stop(end), usage=self._usage(end), **told)
        return [*begun, *self._close(), stop, _event("message_stop")]

    def _open(self, block: dict[str, Any]) -> bytes:
        self._block = block
        self._n_blocks += 1
        return _event("content_block_start", index=self._n_blocks - 1, content_block=block)

    def _close(self) -> list[bytes]:
        if self._block is None:
            return []
        self._block = None
        return [_event("content_block_stop", index=self._n_blocks - 1)]

    def _stop(self, end: End) -> dict[str, Any]:
        is_stop = end.completion.stop_reason is StopReason.STOP
        reason = "tool_use" if self._has_tools else "stop_sequence" if is_stop else "end_turn"
        return {
            "stop_reason": "max_tokens" if end.is_cut else reason,
            "stop_sequence": self._stop_string(end.completion) if is_stop else None,
        }

    def _usage(self, end: End) -> dict[str, Any]:
        done = end.completion
        return {
            "input_tokens": done.n_prompt_tokens - done.n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": done.n_cached,
            "output_tokens": done.summary.n_tokens,
            "output_tokens_details": {"thinking_tokens": end.n_thought},
        }


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; as much as there is where the answer was cut, as Anthropic's client has it."""
    try:
        found = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)
