"""`POST /v1/messages`: Anthropic's API, which coding agents speak. Texts only up to now."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llamaspec.chat.message import Message
from llamaspec.engine.events import Completion, StopReason
from llamaspec.serve.conversations import MAX_MESSAGES, Content, MessageFields, conversation, text_of
from llamaspec.serve.deltas import Content as ContentDelta
from llamaspec.serve.deltas import Deltas, End, Reasoning, Said, Silence, ToolStart, Whole
from llamaspec.serve.faults import anthropic_error, fault_of
from llamaspec.serve.fields import MAX_STOPS, Count, Fields, SamplingFields, StopText, refuse_unsupported
from llamaspec.serve.figures import timings
from llamaspec.serve.service import Service, body_of
from llamaspec.serve.sse import event


class Thinking(Fields):
    """Whether the model thinks before it answers."""

    type: str


class CountRequest(Fields):
    """A conversation whose tokens are to be counted."""

    model: str | None = None
    messages: Annotated[list[MessageFields], Field(max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: list[dict[str, Any]] | None = None

    def conversation(self) -> list[Message]:
        """Its messages, the system prompt first."""
        refuse_unsupported(tools=self.tools)
        messages = conversation(self.messages)
        system = text_of(self.system, "system")
        return [Message("system", system), *messages] if system else messages


class MessagesRequest(SamplingFields, CountRequest):
    """A conversation to answer."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    thinking: Thinking | None = None
    tool_choice: dict[str, Any] | None = None


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await body_of(request, MessagesRequest)
    refuse_unsupported(
        thinking=body.thinking is not None and body.thinking.type != "disabled",
        tool_choice=body.tool_choice is not None and body.tool_choice.get("type") not in ("auto", "none"),
    )
    prompt = await run_in_threadpool(service.prompts.of_messages, body.conversation())
    stops = tuple(body.stop_sequences or ())
    seed = body.seed_or_random()
    jobs = service.jobs([prompt], body, max_tokens=body.max_tokens, stops=stops, seed=seed)
    form = _Form(service.model_name, len(prompt), lambda done: service.stop_string(done, stops))
    return await service.respond(request, jobs, stream=bool(body.stream), events=form.events, form=form.whole)


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation."""
    service: Service = request.app.state.service
    body = await body_of(request, CountRequest)
    tokens = await run_in_threadpool(service.prompts.of_messages, body.conversation(), fits=False)
    return JSONResponse({"input_tokens": len(tokens)})


class _Form:
    """Anthropic's objects for one request."""

    def __init__(self, model: str, n_prompt: int, stop_string: Callable[[Completion], str | None]) -> None:
        self._n_prompt, self._stop_string = n_prompt, stop_string
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
        row = rows[0]
        content: list[dict[str, Any]] = []
        if row.reasoning:
            content.append({"type": "thinking", "thinking": row.reasoning, "signature": ""})
        if row.content or not (content or row.tools):
            content.append({"type": "text", "text": row.content})
        for tool in row.tools:
            arguments = json.loads(tool.arguments or "{}")
            content.append({"type": "tool_use", "id": tool.id, "name": tool.name, "input": arguments})
        self._has_tools = bool(row.tools)
        end = row.ended
        return {
            **self._head,
            "content": content,
            **self._stop(end),
            "usage": self._usage(end),
            "timings": timings(end),
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
        if isinstance(said, ToolStart):
            self._has_tools = True
            block = {"type": "tool_use", "id": said.id, "name": said.name, "input": {}}
            return [*self._close(), self._open(block)]
        if isinstance(said, ContentDelta):
            block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": said.text}
        elif isinstance(said, Reasoning):
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
        stop = _event("message_delta", delta=self._stop(end), usage=self._usage(end), timings=timings(end))
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

    def _usage(self, end: End) -> dict[str, int]:
        done = end.completion
        return {
            "input_tokens": done.n_prompt_tokens - done.n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": done.n_cached,
            "output_tokens": done.summary.n_tokens,
        }


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)
