"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, which coding agents use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llamaspec.chat.messages import CallDelta, ContentDelta, Delta, ReasoningDelta
from llamaspec.engine.completion import StopReason
from llamaspec.serve.bodies import (
    AnswerOptions,
    Fields,
    GenerationBody,
    Limit,
    ModelBody,
    ReasoningFields,
    Stops,
    Whole,
)
from llamaspec.serve.constraints import FormatFields, inner_format
from llamaspec.serve.http_errors import anthropic_error
from llamaspec.serve.jobs import ChatRequest, RequestBuilder
from llamaspec.serve.message_fields import (
    MAX_MESSAGES,
    Content,
    MessageFields,
    ToolChoiceFields,
    Tools,
    conversation,
    system_message,
    text_of,
    tool_use,
)
from llamaspec.serve.request_queue import Finished, PromptProgress
from llamaspec.serve.response_forms import Data, Form, WholeAnswer, arguments_of, figures, new_id, sse
from llamaspec.serve.service import Endpoint, Service


class ThinkingFields(Fields):
    """Whether the model reasons before it answers, and how much."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Whole, Field(ge=0, lt=1 << 31)] | None = None


class CountTokensBody(ReasoningFields, ModelBody):
    """A conversation whose tokens are counted."""

    messages: Annotated[list[MessageFields], Field(max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceFields | None = None
    thinking: ThinkingFields | None = None
    output_config: FormatFields | None = None

    def chat_request(self) -> ChatRequest:
        """Return the conversation to answer."""
        messages = conversation("messages", enumerate(self.messages))
        if system := text_of(self.system, "system"):
            messages = [system_message(system, "system"), *messages]
        thinking = self.thinking or ThinkingFields(type="adaptive")
        reasoning = self.reasoning_options(budget=thinking.budget_tokens, off=thinking.type == "disabled")
        use = tool_use(self.tools, self.tool_choice, None, kind="custom")
        wanted = inner_format(self.output_config, "output_config")
        return ChatRequest(messages, "messages", use, reasoning, wanted)


class MessagesBody(GenerationBody, CountTokensBody):
    """A conversation to answer."""

    max_tokens: Annotated[Limit, Field(ge=0)]
    stop_sequences: Stops | None = None

    def answer_options(self) -> AnswerOptions:
        """Return the options of its answer."""
        return AnswerOptions(limit=self.max_tokens, stops=self.stop_sequences or ())


async def _create(service: Service, http: Request, body: MessagesBody) -> Response:
    """Answer a conversation."""
    prompt = await service.chat(await run_in_threadpool(body.chat_request))
    form = MessagesForm(service.model_name, body, len(prompt.tokens), service.builder)
    return await service.respond(http, body, [prompt], form)


async def _count_tokens(service: Service, http: Request, body: CountTokensBody) -> Response:
    """Count the tokens of a conversation."""
    request = await run_in_threadpool(body.chat_request)
    prompt = await service.builder.rendered(request, must_fit=False)
    return JSONResponse({"input_tokens": len(prompt.tokens)})


class MessagesForm(Form):
    """Writes a message object or its events. A content block grows, and stops before the next starts."""

    def __init__(self, model: str, body: MessagesBody, n_prompt: int, builder: RequestBuilder) -> None:
        options = body.chosen_options
        self._n_prompt, self._builder, self._stops = n_prompt, builder, options.stops
        self._drafting = options.drafting
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}
        self._is_begun = False
        self._content: list[Data] = []  # blocks
        self._open_type: str | None = None  # of the last block; None if it has stopped
        self._text = ""  # of the last block

    def whole(self, answers: Sequence[WholeAnswer]) -> Data:
        """Return the message object."""
        (answer,) = answers
        for delta in answer.deltas:
            self._add(0, delta)
        self._finish(0, answer.end)
        ended = {**self._stop(answer.end), "usage": self._usage(answer.end)}
        return {**self._head, "content": self._content, **ended, **figures(answer.end, self._drafting)}

    def _keep_alive(self, index: int, progress: PromptProgress) -> bytes:
        if self._is_begun:
            return _event("ping")
        n, n_cached = progress.n_processed, progress.n_cached
        if n is not None and (n_cached < n or n == progress.n_total):  # no more of the prompt is cached
            return self._start(n_cached)
        return super()._keep_alive(index, progress)

    def _start(self, n_cached: int) -> bytes:
        """Return the first event, unless it was sent. It waits until the number of cached tokens is known."""
        if self._is_begun:
            return b""
        self._is_begun = True
        empty: Data = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {**_input_usage(self._n_prompt, n_cached), "output_tokens": 0}
        return _event("message_start", message={**self._head, **empty, "usage": usage})

    def _error(self, exception: Exception) -> bytes:
        return _error_event(exception)

    def _add(self, index: int, delta: Delta) -> bytes:
        begun = self._start(0)  # usually sent before, with the progress of the prompt
        if isinstance(delta, CallDelta):
            return begun + self._open({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
        if isinstance(delta, ContentDelta):
            more = {"type": "text_delta", "text": delta.text}
            if self._open_type != "text":
                begun += self._open({"type": "text", "text": ""})
        elif isinstance(delta, ReasoningDelta):
            more = {"type": "thinking_delta", "thinking": delta.text}
            if self._open_type != "thinking":
                begun += self._open({"type": "thinking", "thinking": "", "signature": ""})
        else:
            more = {"type": "input_json_delta", "partial_json": delta.text}
        self._text += delta.text
        return begun + _event("content_block_delta", index=len(self._content) - 1, delta=more)

    def _finish(self, index: int, end: Finished) -> bytes:
        begun = self._start(end.completion.n_cached)
        begun += b"" if self._content else self._open({"type": "text", "text": ""})
        ended = {"delta": self._stop(end), "usage": self._usage(end), **figures(end, self._drafting)}
        return begun + self._close() + _event("message_delta", **ended) + _event("message_stop")

    def _open(self, block: Data) -> bytes:
        """Close the open block and open another."""
        closed, self._open_type, self._text = self._close(), block["type"], ""
        begun = _event("content_block_start", index=len(self._content), content_block=block)
        self._content.append(block)
        return closed + begun

    def _close(self) -> bytes:
        kind, self._open_type = self._open_type, None
        if kind is None:
            return b""
        self._content[-1] |= {"input": arguments_of(self._text)} if kind == "tool_use" else {kind: self._text}
        return _event("content_block_stop", index=len(self._content) - 1)

    def _stop(self, end: Finished) -> Data:
        done = end.completion
        reason = "stop_sequence" if done.stop_reason is StopReason.STOP else "end_turn"
        if any(block["type"] == "tool_use" for block in self._content):
            reason = "tool_use"
        sequence = self._builder.matched_stop(done, self._stops)
        return {"stop_reason": "max_tokens" if end.is_truncated else reason, "stop_sequence": sequence}

    def _usage(self, end: Finished) -> Data:
        done = end.completion
        return {
            **_input_usage(done.n_prompt_tokens, done.n_cached),
            "output_tokens": done.summary.n_tokens,
            "output_tokens_details": {"thinking_tokens": end.n_reasoning},
        }


def _input_usage(n_prompt: int, n_cached: int) -> Data:
    counts = {"input_tokens": n_prompt - n_cached, "cache_creation_input_tokens": 0}
    return {**counts, "cache_read_input_tokens": n_cached}


def _error_event(error: Exception) -> bytes:
    return sse(anthropic_error(error), "error")


def _failure(model: str, body: MessagesBody, error: Exception) -> bytes:
    return _error_event(error)


def _event(kind: str, **data: Any) -> bytes:
    return sse({"type": kind, **data}, kind)


ENDPOINTS = (
    Endpoint("/v1/messages", _create, MessagesBody, failure=_failure),
    Endpoint("/v1/messages/count_tokens", _count_tokens, CountTokensBody),
)
