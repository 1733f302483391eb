"""`POST /v1/completions`: a text goes on. OpenAI's older API, which most tools for code still use."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.constraints import Shape
from llamaspec.serve.deltas import Content, Deltas, End, Silence, TokenLogprobs, Whole
from llamaspec.serve.faults import RequestError, fault_of, not_supported, openai_error
from llamaspec.serve.fields import (
    MAX_STOPS,
    CountOrAny,
    Fields,
    SamplingFields,
    StopText,
    StreamOptions,
    refuse_unsupported,
    stops_of,
)
from llamaspec.serve.figures import figures, openai_usage
from llamaspec.serve.probabilities import columns
from llamaspec.serve.service import Service, body_of
from llamaspec.serve.sse import DONE, comment, event
from llamaspec.values import TokenArray


class NamedSchema(Fields):
    """A JSON schema and what it is called."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Fields):
    """What the answer must be."""

    type: str
    json_schema: NamedSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # llama-server's place for it

    def shape(self, field: str) -> Shape | None:
        """What follows from it.

        Raises
        ------
        RequestError
            It is of an unknown type, or has no schema.
        """
        if self.type == "text":
            return None
        if self.type not in ("json_object", "json_schema"):
            raise not_supported(f"{field}.type", "must be text, json_object or json_schema")
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        if schema is None and self.type == "json_schema":
            raise RequestError(400, f"{field}.json_schema: is missing", field=f"{field}.json_schema")
        return schema_shape({"type": "object"} if schema is None else schema, field)


class OpenAIFields(SamplingFields):
    """What both of OpenAI's older APIs have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: CountOrAny | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None

    def shape(self) -> Shape | None:
        """What the answer must look like.

        Raises
        ------
        RequestError
            Several fields say so.
        """
        shapes = [
            None if self.response_format is None else self.response_format.shape("response_format"),
            None if self.json_schema is None else schema_shape(self.json_schema, "json_schema"),
            None if not self.grammar else Shape("grammar", self.grammar, "grammar"),
        ]
        given = [shape for shape in shapes if shape is not None]
        if len(given) > 1:
            field = given[1].field
            raise RequestError(400, f"{field}: the answer can have one shape only", field=field)
        return given[0] if given else None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return stops_of(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(OpenAIFields):
    """A text to continue."""

    prompt: str | list[int] | Annotated[list[str], Field(min_length=1)] | list[list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


async def completions(request: Request) -> Response:
    """Continue a text."""
    service: Service = request.app.state.service
    body = await body_of(request, CompletionRequest)
    refuse_unsupported(
        echo=body.echo,
        suffix=body.suffix,
        best_of=(body.best_of or 1) > (body.n or 1),
    )
    manner = await service.manner(body.shape())
    prompts = await run_in_threadpool(_prompts, service, body)
    seed = body.seed_or_random()
    n = body.n or 1
    jobs = service.jobs(
        prompts,
        body,
        n=n,
        max_tokens=body.max_tokens,
        stops=body.stops,
        seed=seed,
        manner=manner,
        n_logprobs=body.logprobs,
    )
    form = _Form(service.model_name, seed, body, service.pair.target.vocabulary)
    return await service.respond(request, jobs, stream=bool(body.stream), events=form.events, form=form.whole)


def finish_reason(end: End) -> str:
    """Why a text ended, in OpenAI's words."""
    return "length" if end.is_cut else "stop"


def schema_shape(schema: dict[str, Any], field: str) -> Shape:
    """The shape of JSON."""
    return Shape("json_schema", json.dumps(schema), field)


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

    def __init__(
        self, model: str, seed: int, body: CompletionRequest, vocabulary: LlamaVocabulary | None = None
    ) -> None:
        self._n, self._include_usage = body.n or 1, body.include_usage
        self._with_rounds = body.wants_rounds
        self._vocabulary = vocabulary if body.logprobs is not None else None
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "seed": seed,
        }

    def whole(self, rows: Sequence[Whole]) -> dict[str, Any]:
        """The answer as one object."""
        choices = [
            self._choice(i, row.message.text, finish_reason(row.end), row.logprobs)
            for i, row in enumerate(rows)
        ]
        ends = [row.end for row in rows]
        return {
            **self._head,
            "choices": choices,
            "usage": openai_usage(ends, self._n),
            **figures(ends[0], self._with_rounds),
        }

    async def events(self, of: Deltas) -> AsyncIterator[bytes]:
        """The answer as it is made."""
        ends: dict[int, End] = {}
        n_said: Counter[int] = Counter()  # characters of each choice
        try:
            async for i, delta in of:
                if isinstance(delta, Silence):
                    yield comment(delta)
                elif isinstance(delta, Content):
                    choice = self._choice(i, delta.text, None, delta.logprobs, n_said[i])
                    n_said[i] += len(delta.text)
                    yield event({**self._head, "choices": [choice]})
                elif isinstance(delta, End):
                    ends[i] = delta
                    last = self._choice(i, "", finish_reason(delta), ())
                    yield event({**self._head, "choices": [last], **figures(delta, self._with_rounds)})
        except Exception as error:  # noqa: BLE001  # the client is told
            yield event(openai_error(fault_of(error)))
            return
        if self._include_usage:
            usage = openai_usage([ends[i] for i in sorted(ends)], self._n)
            yield event({**self._head, "choices": [], "usage": usage})
        yield DONE

    def _choice(
        self, index: int, text: str, reason: str | None, tokens: Sequence[TokenLogprobs], offset: int = 0
    ) -> dict[str, Any]:
        told = None if self._vocabulary is None else columns(tokens, self._vocabulary, offset)
        return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}
