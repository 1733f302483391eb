"""`POST /v1/responses`: OpenAI's newer API, without its memory: a request brings its whole conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from llamaspec.chat.message import Message
from llamaspec.serve.conversations import MAX_MESSAGES, Content, MessageFields, conversation
from llamaspec.serve.deltas import Deltas, End, Said, Silence, Whole
from llamaspec.serve.faults import fault_of, not_supported, openai_error
from llamaspec.serve.fields import Count, Fields, SamplingFields, refuse_unsupported
from llamaspec.serve.figures import timings
from llamaspec.serve.response_items import Items, whole_items
from llamaspec.serve.service import Service, body_of
from llamaspec.serve.sse import comment, event


class InputItem(Fields):
    """A message, or another item of a conversation."""

    type: str | None = None
    role: str | None = None
    content: Content | None = None


class TextFormat(Fields):
    """What the text must be."""

    type: str


class TextFields(Fields):
    """How the answer is written."""

    format: TextFormat | None = None


class ResponsesRequest(SamplingFields):
    """A conversation to answer."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    text: TextFields | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None

    def messages(self) -> list[Message]:
        """Its messages, the instructions first."""
        if isinstance(self.input, str):
            asked = [MessageFields(role="user", content=self.input)]
        else:
            asked = [_message(item, i) for i, item in enumerate(self.input)]
        system = [Message("system", self.instructions)] if self.instructions else []
        return [*system, *conversation(asked, "input")]


async def responses(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await body_of(request, ResponsesRequest)
    text_format = body.text.format if body.text is not None else None
    refuse_unsupported(
        **{"text.format": text_format is not None and text_format.type != "text"},
        tools=body.tools,
        tool_choice=body.tool_choice not in (None, "auto", "none"),
        top_logprobs=body.top_logprobs,
        background=body.background,
    )
    if body.previous_response_id or body.conversation:
        field = "previous_response_id" if body.previous_response_id else "conversation"
        raise not_supported(field, "this server keeps no conversations; send the whole input")
    prompt = await run_in_threadpool(service.prompts.of_messages, body.messages(), field="input")
    seed = body.seed_or_random()
    jobs = service.jobs([prompt], body, max_tokens=body.max_output_tokens, seed=seed)
    form = _Form(service.model_name, body, seed)
    return await service.respond(request, jobs, stream=bool(body.stream), events=form.events, form=form.whole)


def _message(item: InputItem, i: int) -> MessageFields:
    if item.type not in (None, "message"):
        raise not_supported(f"input.{i}.type", "only messages are supported yet")
    return MessageFields(role=item.role or "", content=item.content)


class _Form:
    """The response object and its events."""

    def __init__(self, model: str, body: ResponsesRequest, seed: int) -> None:
        sampling = body.sampling()
        self._head: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "seed": seed,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "truncation": "disabled",
        }
        self._number = 0  # of the next event

    def whole(self, rows: Sequence[Whole]) -> dict[str, Any]:
        """The answer as one object."""
        end = rows[0].ended
        return self._ended(whole_items(rows[0], "incomplete" if end.is_cut else "completed"), end)

    async def events(self, of: Deltas) -> AsyncIterator[bytes]:
        """The answer as it is made."""
        begun = self._response("in_progress", [])
        yield self._event({"type": "response.created", "response": begun})
        yield self._event({"type": "response.in_progress", "response": begun})
        items = Items()
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
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": n_prompt + n_written,
        }
        response["timings"] = timings(end)
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        empty = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": output, **empty}

    def _event(self, data: dict[str, Any]) -> bytes:
        self._number += 1
        return event({**data, "sequence_number": self._number - 1}, data["type"])
