"""`POST /v1/completions`: a text goes on. OpenAI's older API, which most tools for code still use."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from llamaspec.serve.deltas import Content, Deltas, End, Silence, Whole
from llamaspec.serve.faults import fault_of, openai_error
from llamaspec.serve.fields import (
    MAX_STOPS,
    Count,
    SamplingFields,
    StopText,
    StreamOptions,
    refuse_unsupported,
    stops_of,
)
from llamaspec.serve.figures import openai_usage, timings
from llamaspec.serve.service import Service, body_of
from llamaspec.serve.sse import DONE, comment, event
from llamaspec.values import TokenArray


class OpenAIFields(SamplingFields):
    """What both of OpenAI's older APIs have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    user: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return stops_of(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(OpenAIFields):
    """A text to continue."""

    prompt: str | list[int] | Annotated[list[str], Field(min_length=1)] | list[list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None


async def completions(request: Request) -> Response:
    """Continue a text."""
    service: Service = request.app.state.service
    body = await body_of(request, CompletionRequest)
    refuse_unsupported(
        echo=body.echo,
        suffix=body.suffix,
        best_of=(body.best_of or 1) > (body.n or 1),
        logprobs=body.logprobs is not None,
        grammar=body.grammar,
        json_schema=body.json_schema,
    )
    prompts = await run_in_threadpool(_prompts, service, body)
    seed = body.seed_or_random()
    n = body.n or 1
    jobs = service.jobs(prompts, body, n=n, max_tokens=body.max_tokens, stops=body.stops, seed=seed)
    form = _Form(service.model_name, seed, n, body.include_usage)
    return await service.respond(request, jobs, stream=bool(body.stream), events=form.events, form=form.whole)


def finish_reason(end: End) -> str:
    """Why a text ended, in OpenAI's words."""
    return "length" if end.is_cut else "stop"


def _prompts(service: Service, body: CompletionRequest) -> list[TokenArray]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [service.prompts.of_text(prompt)]
    if not prompt or isinstance(prompt[0], int):
        return [service.prompts.of_tokens(prompt)]  # type: ignore[arg-type]
    if isinstance(prompt[0], str):
        return [service.prompts.of_text(text) for text in prompt]
    return [service.prompts.of_tokens(tokens) for tokens in prompt]


class _Form:
    """OpenAI's objects for one request."""

    def __init__(self, model: str, seed: int, n: int, include_usage: bool) -> None:
        self._n, self._include_usage = n, include_usage
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "seed": seed,
        }

    def whole(self, rows: Sequence[Whole]) -> dict[str, Any]:
        """The answer as one object."""
        choices = [_choice(i, row.content, finish_reason(row.ended)) for i, row in enumerate(rows)]
        ends = [row.ended for row in rows]
        return {
            **self._head,
            "choices": choices,
            "usage": openai_usage(ends, self._n),
            "timings": timings(ends[0]),
        }

    async def events(self, of: Deltas) -> AsyncIterator[bytes]:
        """The answer as it is made."""
        ends: dict[int, End] = {}
        try:
            async for i, delta in of:
                if isinstance(delta, Silence):
                    yield comment(delta)
                elif isinstance(delta, Content):
                    yield event({**self._head, "choices": [_choice(i, delta.text, None)]})
                elif isinstance(delta, End):
                    ends[i] = delta
                    last = {"choices": [_choice(i, "", finish_reason(delta))], "timings": timings(delta)}
                    yield event({**self._head, **last})
        except Exception as error:  # noqa: BLE001  # the client is told
            yield event(openai_error(fault_of(error)))
            return
        if self._include_usage:
            usage = openai_usage([ends[i] for i in sorted(ends)], self._n)
            yield event({**self._head, "choices": [], "usage": usage})
        yield DONE


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
