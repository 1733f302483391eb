"""`POST /v1/chat/completions`: OpenAI's chat API, which nearly every client speaks."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from llamaspec.serve.completions import OpenAIFields, finish_reason
from llamaspec.serve.conversations import MAX_MESSAGES, MessageFields, conversation
from llamaspec.serve.deltas import (
    Content,
    Deltas,
    End,
    Reasoning,
    Said,
    Silence,
    ToolArguments,
    ToolStart,
    Whole,
)
from llamaspec.serve.faults import fault_of, openai_error
from llamaspec.serve.fields import Count, Fields, refuse_unsupported
from llamaspec.serve.figures import openai_usage, timings
from llamaspec.serve.service import Service, body_of
from llamaspec.serve.sse import DONE, comment, event


class ResponseFormat(Fields):
    """What the answer must be."""

    type: str
    json_schema: dict[str, Any] | None = None


class ChatRequest(OpenAIFields):
    """A conversation to answer."""

    messages: Annotated[list[MessageFields], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await body_of(request, ChatRequest)
    refuse_unsupported(
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        response_format=body.response_format is not None and body.response_format.type != "text",
        tools=body.tools,
        tool_choice=body.tool_choice not in (None, "auto", "none"),
        chat_template_kwargs=body.chat_template_kwargs,
        grammar=body.grammar,
        json_schema=body.json_schema,
    )
    prompt = await run_in_threadpool(service.prompts.of_messages, conversation(body.messages))
    seed, n = body.seed_or_random(), body.n or 1
    jobs = service.jobs(
        [prompt],
        body,
        n=n,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stops=body.stops,
        seed=seed,
    )
    form = _Form(service.model_name, seed, n, body.include_usage)
    return await service.respond(request, jobs, stream=bool(body.stream), events=form.events, form=form.whole)


class _Form:
    """OpenAI's objects for one request."""

    def __init__(self, model: str, seed: int, n: int, include_usage: bool) -> None:
        self._n, self._include_usage = n, include_usage
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "seed": seed,
        }
        self._n_tools = [0] * n

    def whole(self, rows: Sequence[Whole]) -> dict[str, Any]:
        """The answer as one object."""
        ends = [row.ended for row in rows]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {"index": i, "message": _message(row), "logprobs": None, "finish_reason": _reason(row)}
                for i, row in enumerate(rows)
            ],
            "usage": openai_usage(ends, self._n),
            "timings": timings(ends[0]),
        }

    async def events(self, of: Deltas) -> AsyncIterator[bytes]:
        """The answer as it is made."""
        ends: dict[int, End] = {}
        for i in range(self._n):
            yield self._chunk(i, {"role": "assistant", "content": ""})
        try:
            async for i, delta in of:
                if isinstance(delta, Silence):
                    yield comment(delta)
                elif isinstance(delta, End):
                    ends[i] = delta
                    reason = "tool_calls" if self._n_tools[i] else finish_reason(delta)
                    yield self._chunk(i, {}, reason, timings=timings(delta))
                else:
                    yield self._chunk(i, self._delta(i, delta))
        except Exception as error:  # noqa: BLE001  # the client is told
            yield event(openai_error(fault_of(error)))
            return
        if self._include_usage:
            usage = openai_usage([ends[i] for i in sorted(ends)], self._n)
            yield event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        yield DONE

    def _chunk(self, i: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": reason}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **more})

    def _delta(self, i: int, said: Said) -> dict[str, Any]:
        if isinstance(said, Content):
            return {"content": said.text}
        if isinstance(said, Reasoning):
            return {"reasoning_content": said.text}
        if isinstance(said, ToolStart):
            self._n_tools[i] += 1
            function = {"name": said.name, "arguments": ""}
            call: dict[str, Any] = {"id": said.id, "type": "function", "function": function}
        else:
            assert isinstance(said, ToolArguments)
            call = {"function": {"arguments": said.text}}
        return {"tool_calls": [{"index": self._n_tools[i] - 1, **call}]}


def _reason(row: Whole) -> str:
    return "tool_calls" if row.tools else finish_reason(row.ended)


def _message(row: Whole) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": row.content, "refusal": None}
    if row.reasoning:
        message["reasoning_content"] = row.reasoning
    if row.tools:
        message["content"] = row.content or None
        message["tool_calls"] = [
            {"id": tool.id, "type": "function", "function": {"name": tool.name, "arguments": tool.arguments}}
            for tool in row.tools
        ]
    return message
