"""`POST /v1/chat/completions` and `POST /v1/completions`: OpenAI's APIs that nearly every client uses."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from llamaspec.chat.parse import ArgumentsDelta, CallDelta, ReasoningDelta
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.bodies import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    CountOrAny,
    Effort,
    Fields,
    MessageFields,
    SamplingFields,
    StopText,
    TopLogprobs,
    bad_field,
    conversation,
    not_supported,
    openai_error,
    placed,
)
from llamaspec.serve.deltas import (
    Answer,
    Content,
    Deltas,
    TextDelta,
    TokenLogprobs,
    figures,
    logprob_columns,
    logprob_list,
    openai_usage,
)
from llamaspec.serve.requests import (
    ChatRequest,
    GenerationParameters,
    ReasoningFields,
    RequestBuilder,
    ResponseFormat,
    ToolChoiceFields,
    ToolFields,
    tool_use,
)
from llamaspec.serve.scheduling import Finished, PromptProgress
from llamaspec.serve.service import DONE, comment, event, parse_body, service_of
from llamaspec.values import TokenArray


class NamedSchema(Fields):
    """A JSON schema."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormatFields(Fields):
    """What the answer must match."""

    type: str
    json_schema: NamedSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # llama-server, responses API

    def response_format(self, field: str) -> list[ResponseFormat]:
        """None for text, else one; RequestError if the type is unknown or the schema is missing."""
        if self.type == "text":
            return []
        if self.type not in ("json_object", "json_schema"):
            raise not_supported(f"{field}.type", "must be text, json_object or json_schema")
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        if schema is None and self.type == "json_schema":
            raise bad_field(f"{field}.json_schema", "is missing")
        return [ResponseFormat.schema({"type": "object"} if schema is None else schema, field)]


class StreamOptions(Fields):
    """What a stream contains."""

    include_usage: bool | None = None


class OpenAIBody(SamplingFields):
    """The fields of both APIs."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: CountOrAny | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    response_format: ResponseFormatFields | None = None

    def wanted_format(self) -> ResponseFormat | None:
        """What the answer must match; RequestError if several fields say so."""
        found: list[ResponseFormat] = []
        if self.response_format is not None:
            found += self.response_format.response_format("response_format")
        if self.json_schema is not None:
            found.append(ResponseFormat.schema(self.json_schema, "json_schema"))
        if self.grammar:
            found.append(ResponseFormat("grammar", self.grammar, "grammar"))
        if len(found) > 1:
            raise bad_field(found[1].field, "only one field may give the format of the answer")
        return found[0] if found else None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatBody(OpenAIBody, ReasoningFields):
    """A conversation to answer."""

    messages: Annotated[list[MessageFields], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: CountOrAny | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ToolChoiceFields | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None

    def chat_request(self, *, takes_tools: bool) -> ChatRequest:
        """What the model is asked."""
        return ChatRequest(
            conversation(placed(self.messages), takes_tools=takes_tools),
            tool_use=tool_use(self.tools, self.tool_choice, self.parallel_tool_calls, nested=True),
            reasoning=self.reasoning_options(self.reasoning_effort),
            response_format=self.wanted_format(),
        )


class CompletionBody(OpenAIBody):
    """A text to continue."""

    prompt: str | list[int] | Annotated[list[str], Field(min_length=1)] | list[list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: TopLogprobs | None = None


async def chat_completions(http: Request) -> Response:
    """Answer a conversation."""
    service, body = service_of(http), await parse_body(http, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    builder = service.builder
    prompt, parameters = await builder.chat(body.chat_request(takes_tools=builder.takes_tools))
    seed, max_tokens = body.seed_or_random(), body.max_completion_tokens or body.max_tokens
    n_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    requests = builder.requests(
        [prompt], body, parameters, seed,
        n=body.n or 1, max_tokens=max_tokens, stops=body.stops, n_logprobs=n_logprobs,
    )  # fmt: skip
    form = ChatForm(service.model_name, seed, body, builder.vocabulary)
    return await service.respond(http, requests, form, body.stream)


async def completions(http: Request) -> Response:
    """Continue a text."""
    service, body = service_of(http), await parse_body(http, CompletionBody)
    n, builder = body.n or 1, service.builder
    for field, given in (("echo", body.echo), ("suffix", body.suffix), ("best_of", (body.best_of or 1) > n)):
        if given:
            raise not_supported(field)
    wanted = body.wanted_format()
    parameters = GenerationParameters(constraint=None if wanted is None else await builder.compile(wanted))
    prompts = await run_in_threadpool(_prompts, builder, body.prompt)
    seed = body.seed_or_random()
    requests = builder.requests(
        prompts, body, parameters, seed,
        n=n, max_tokens=body.max_tokens, stops=body.stops, n_logprobs=body.logprobs,
    )  # fmt: skip
    form = CompletionForm(service.model_name, seed, body, builder.vocabulary)
    return await service.respond(http, requests, form, body.stream)


def _prompts(builder: RequestBuilder, prompt: str | list[Any]) -> list[TokenArray]:
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        prompt = [prompt]
    return [
        builder.text_prompt(each) if isinstance(each, str) else builder.token_prompt(each) for each in prompt
    ]


class _OpenAIForm(ABC):
    """The objects of both APIs; subclasses make the choices."""

    kind: str  # of the object
    chunk_kind: str
    id_prefix: str

    def __init__(self, model: str, seed: int, body: OpenAIBody, vocabulary: LlamaVocabulary) -> None:
        self._n, self._vocabulary = body.n or 1, vocabulary
        self._with_rounds, self._with_spans = bool(body.drafting.rounds), bool(body.drafting.spans)
        self._with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "seed": seed,
        }

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The response object."""
        ends = [answer.end for answer in answers]
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        usage = openai_usage(ends, self._n)
        more = figures(ends[0], self._with_rounds)
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage, **more}

    async def events(self, deltas: Deltas) -> AsyncIterator[bytes]:
        """The response as chunks."""
        ends: dict[int, Finished] = {}
        for choice in self._first():
            yield self._chunk([choice])
        try:
            async for i, delta in deltas:
                if isinstance(delta, PromptProgress):
                    yield comment(delta)
                elif isinstance(delta, Finished):
                    ends[i] = delta
                    yield self._chunk([self._last(i, delta)], **figures(delta, self._with_rounds))
                else:
                    spans = delta.spans if self._with_spans and isinstance(delta, Content) else ()
                    told = [{"text": span.text, "drafted": span.drafted} for span in spans]
                    yield self._chunk([self._part(i, delta)], **({"spans": told} if told else {}))
        except Exception as error:  # noqa: BLE001  # the client is told
            yield event(openai_error(error))
            return
        if self._with_usage:
            yield self._chunk([], usage=openai_usage([ends[i] for i in sorted(ends)], self._n))
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head, "object": self.chunk_kind, "choices": choices, **more})

    @abstractmethod
    def _choice(self, i: int, answer: Answer) -> dict[str, Any]:
        """A whole choice."""

    def _first(self) -> list[dict[str, Any]]:
        """The choices with which a stream begins."""
        return []

    @abstractmethod
    def _part(self, i: int, delta: TextDelta) -> dict[str, Any]:
        """A choice that holds a delta."""

    @abstractmethod
    def _last(self, i: int, end: Finished) -> dict[str, Any]:
        """The last chunk's choice."""


class ChatForm(_OpenAIForm):
    """`chat.completion` and its chunks."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, seed: int, body: ChatBody, vocabulary: LlamaVocabulary) -> None:
        super().__init__(model, seed, body, vocabulary)
        self._with_logprobs = bool(body.logprobs)
        self._n_calls: Counter[int] = Counter()  # of each choice

    def _choice(self, i: int, answer: Answer) -> dict[str, Any]:
        said = answer.message
        message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["content"] = said.text or None
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in said.tool_calls
            ]
        logprobs = self._logprobs(answer.logprobs) if self._with_logprobs else None
        reason = self._reason(answer.end, len(said.tool_calls))
        return {"index": i, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _first(self) -> list[dict[str, Any]]:
        return [self._delta(i, {"role": "assistant", "content": ""}) for i in range(self._n)]

    def _part(self, i: int, delta: TextDelta) -> dict[str, Any]:
        if isinstance(delta, Content):
            told = delta.logprobs and self._with_logprobs
            return self._delta(i, {"content": delta.text}, self._logprobs(delta.logprobs) if told else None)
        if isinstance(delta, ReasoningDelta):
            return self._delta(i, {"reasoning_content": delta.text})
        if isinstance(delta, CallDelta):
            self._n_calls[i] += 1
            function = {"name": delta.name, "arguments": ""}
            call: dict[str, Any] = {"id": delta.id, "type": "function", "function": function}
        else:
            assert isinstance(delta, ArgumentsDelta)
            call = {"function": {"arguments": delta.text}}
        return self._delta(i, {"tool_calls": [{"index": self._n_calls[i] - 1, **call}]})

    def _last(self, i: int, end: Finished) -> dict[str, Any]:
        return {**self._delta(i, {}), "finish_reason": self._reason(end, self._n_calls[i])}

    def _reason(self, end: Finished, n_calls: int) -> str:
        return "length" if end.is_truncated else "tool_calls" if n_calls else "stop"

    def _delta(self, i: int, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": logprob_list(tokens, self._vocabulary), "refusal": None}


class CompletionForm(_OpenAIForm):
    """`text_completion` and its chunks."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, model: str, seed: int, body: CompletionBody, vocabulary: LlamaVocabulary) -> None:
        super().__init__(model, seed, body, vocabulary)
        self._with_logprobs, self._with_spans = body.logprobs is not None, False
        self._n_characters: Counter[int] = Counter()  # of each choice

    def _choice(self, i: int, answer: Answer) -> dict[str, Any]:
        last = self._last(i, answer.end)
        return {**last, "text": answer.message.text, "logprobs": self._logprobs(i, answer.logprobs)}

    def _part(self, i: int, delta: TextDelta) -> dict[str, Any]:
        assert isinstance(delta, Content)  # a text has neither reasoning nor calls
        logprobs = self._logprobs(i, delta.logprobs)
        self._n_characters[i] += len(delta.text)
        return {"index": i, "text": delta.text, "logprobs": logprobs, "finish_reason": None}

    def _last(self, i: int, end: Finished) -> dict[str, Any]:
        reason = "length" if end.is_truncated else "stop"
        return {"index": i, "text": "", "logprobs": self._logprobs(i, ()), "finish_reason": reason}

    def _logprobs(self, i: int, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return logprob_columns(tokens, self._vocabulary, self._n_characters[i])
