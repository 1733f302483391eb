"""`POST /v1/responses`: OpenAI's newer API, without its memory: a request brings its whole conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.deltas import Deltas, End, Said, Silence, Whole
from llamaspec.serve.faults import fault_of, not_supported, openai_error
from llamaspec.serve.fields import refuse_unsupported
from llamaspec.serve.figures import figures
from llamaspec.serve.response_items import Items, whole_items
from llamaspec.serve.responses_request import ResponsesRequest
from llamaspec.serve.service import Service, body_of
from llamaspec.serve.sse import comment, event


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
