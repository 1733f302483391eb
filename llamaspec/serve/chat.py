"""`POST /v1/chat/completions`: OpenAI's chat API, which nearly every client speaks."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llamaspec.chat.answers import ArgumentsDelta, CallDelta, ReasoningDelta
from llamaspec.chat.message import Message
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.completions import OpenAIFields, finish_reason
from llamaspec.serve.conversations import MAX_MESSAGES, MessageFields, conversation, function_tool
from llamaspec.serve.deltas import (
    Content,
    Deltas,
    End,
    Said,
    Silence,
    TokenLogprobs,
    Whole,
)
from llamaspec.serve.faults import RequestError, fault_of, openai_error
from llamaspec.serve.fields import CountOrAny, Fields
from llamaspec.serve.figures import figures, openai_usage
from llamaspec.serve.probabilities import token_list
from llamaspec.serve.questions import MAX_TOOLS, Effort, Question, ThinkingFields, ToolName, ToolUse
from llamaspec.serve.service import Service, body_of
from llamaspec.serve.sse import DONE, comment, event


class Function(Fields):
    """A function that the model may want called."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool, which is a function."""

    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    """Names a function."""

    name: str


class NamedTool(Fields):
    """Names a tool."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(OpenAIFields, ThinkingFields):
    """A conversation to answer."""

    messages: Annotated[list[MessageFields], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: CountOrAny | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None

    def question(self, *, takes_tools: bool) -> Question:
        """What the model is asked."""
        functions = [tool.function for tool in self.tools or ()]
        choice = self.tool_choice or "auto"
        use = ToolUse(
            tools=[function_tool(one.name, one.description, one.parameters) for one in functions],
            choice=choice if isinstance(choice, str) else choice.function.name,
            is_named=not isinstance(choice, str),
            is_parallel=self.parallel_tool_calls is not False,
            is_strict=any(one.strict for one in functions),
        )
        messages = conversation(self.messages, takes_tools=takes_tools)
        return Question(
            messages, tool_use=use, thinking=self.thinking(self.reasoning_effort), shape=self.shape()
        )

    @property
    def n_logprobs(self) -> int | None:
        """How many tokens are told with each token; None: nothing is.

        Raises
        ------
        RequestError
            A number without the switch.
        """
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise RequestError(400, "top_logprobs: needs logprobs to be true", field="top_logprobs")
        return None


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await body_of(request, ChatRequest)
    n_logprobs = body.n_logprobs
    prompt, manner = await service.asked(body.question(takes_tools=service.prompts.takes_tools))
    seed, n = body.seed_or_random(), body.n or 1
    jobs = service.jobs(
        [prompt],
        body,
        n=n,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stops=body.stops,
        seed=seed,
        manner=manner,
        n_logprobs=n_logprobs,
    )
    form = _Form(service.model_name, seed, body, service.pair.target.vocabulary)
    return await service.respond(request, jobs, stream=bool(body.stream), events=form.events, form=form.whole)


class _Form:
    """OpenAI's objects for one request."""

    def __init__(
        self, model: str, seed: int, body: ChatRequest, vocabulary: LlamaVocabulary | None = None
    ) -> None:
        self._n, self._include_usage = body.n or 1, body.include_usage
        self._with_rounds, self._with_spans = body.wants_rounds, body.wants_spans
        self._vocabulary = vocabulary if body.logprobs else None
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "seed": seed,
        }
        self._n_tools = [0] * self._n

    def whole(self, rows: Sequence[Whole]) -> dict[str, Any]:
        """The answer as one object."""
        ends = [row.end for row in rows]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": i,
                    "message": _message(row.message),
                    "logprobs": self._logprobs(row.logprobs),
                    "finish_reason": _reason(row.end, has_tools=bool(row.message.tool_calls)),
                }
                for i, row in enumerate(rows)
            ],
            "usage": openai_usage(ends, self._n),
            **figures(ends[0], self._with_rounds),
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
                    reason = _reason(delta, has_tools=self._n_tools[i] > 0)
                    yield self._chunk(i, {}, reason, **figures(delta, self._with_rounds))
                else:
                    yield self._said(i, delta)
        except Exception as error:  # noqa: BLE001  # the client is told
            yield event(openai_error(fault_of(error)))
            return
        if self._include_usage:
            usage = openai_usage([ends[i] for i in sorted(ends)], self._n)
            yield event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        yield DONE

    def _said(self, i: int, said: Said) -> bytes:
        if not isinstance(said, Content):
            return self._chunk(i, self._delta(i, said))
        more: dict[str, Any] = {}
        if self._with_spans:
            more["spans"] = [{"text": span.text, "drafted": span.drafted} for span in said.spans]
        return self._chunk(i, self._delta(i, said), tokens=said.logprobs, **more)

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._vocabulary is None:
            return None
        return {"content": token_list(tokens, self._vocabulary), "refusal": None}

    def _chunk(
        self,
        i: int,
        delta: dict[str, Any],
        reason: str | None = None,
        tokens: Sequence[TokenLogprobs] = (),
        **more: Any,
    ) -> bytes:
        told = self._logprobs(tokens) if tokens else None
        choice = {"index": i, "delta": delta, "logprobs": told, "finish_reason": reason}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **more})

    def _delta(self, i: int, said: Said) -> dict[str, Any]:
        if isinstance(said, Content):
            return {"content": said.text}
        if isinstance(said, ReasoningDelta):
            return {"reasoning_content": said.text}
        if isinstance(said, CallDelta):
            self._n_tools[i] += 1
            function = {"name": said.name, "arguments": ""}
            call: dict[str, Any] = {"id": said.id, "type": "function", "function": function}
        else:
            assert isinstance(said, ArgumentsDelta)
            call = {"function": {"arguments": said.text}}
        return {"tool_calls": [{"index": self._n_tools[i] - 1, **call}]}


def _reason(end: End, *, has_tools: bool) -> str:
    return "tool_calls" if has_tools and not end.is_cut else finish_reason(end)


def _message(said: Message) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["content"] = said.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.tool_calls
        ]
    return message
