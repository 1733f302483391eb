"""`POST /v1/chat/completions` and `POST /v1/completions`: the OpenAI APIs that nearly every client uses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from llamaspec.chat.messages import CallDelta, ContentDelta, Delta, ReasoningDelta, TokenLogprobs
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.bodies import (
    AnswerOptions,
    Effort,
    Fields,
    GenerationBody,
    JsonObject,
    Limit,
    OneOrMoreStops,
    ReasoningFields,
    TokenIds,
    TopLogprobs,
    Whole,
    refused,
)
from llamaspec.serve.constraints import FormatFields, ResponseFormat
from llamaspec.serve.http_errors import bad_field, not_supported
from llamaspec.serve.jobs import ChatRequest, RequestBuilder
from llamaspec.serve.message_fields import (
    MAX_MESSAGES,
    Content,
    MessageFields,
    ToolChoiceFields,
    Tools,
    conversation,
    text_of,
    tool_use,
)
from llamaspec.serve.request_queue import Finished, PromptProgress
from llamaspec.serve.response_forms import (
    Data,
    Form,
    WholeAnswer,
    figures,
    logprob_list,
    new_id,
    openai_usage,
    sse,
)
from llamaspec.serve.service import Endpoint, Service
from llamaspec.values import TokenArray

MAX_PROMPTS = 1024


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None


class PredictionFields(Fields):
    """Text that the answer is expected to mostly repeat."""

    type: Literal["content"]
    content: Content


class OpenAIBody(GenerationBody):
    """Fields of both APIs, and of llama-server's own."""

    stop: OneOrMoreStops | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None  # llama-server's
    max_tokens: Limit | None = None
    n: Annotated[Whole, Field(ge=1, le=64)] | None = None
    grammar: str | None = None
    json_schema: JsonObject | None = None
    response_format: FormatFields | None = None
    prediction: PredictionFields | None = None

    def wanted_format(self) -> ResponseFormat | None:
        """Return the format of the answer; RequestError if several fields give one."""
        wanted = None if self.response_format is None else self.response_format.wanted("response_format")
        found = [] if wanted is None else [wanted]
        if self.json_schema is not None:
            found.append(ResponseFormat.of_schema(self.json_schema, "json_schema", "json_schema"))
        if self.grammar:
            found.append(ResponseFormat("grammar", self.grammar, "grammar", "grammar"))
        if len(found) > 1:
            raise bad_field(found[1].field, "only one field may give the format of the answer")
        return found[0] if found else None

    def answer_options(self) -> AnswerOptions:
        """Return the options of its answers; RequestError if a part of the prediction is not text."""
        prediction = None if self.prediction is None else self.prediction.content
        return AnswerOptions(
            limit=self.max_tokens,
            n=self.n or 1,
            stops=self.stop or (),
            prediction=text_of(prediction, "prediction.content") or None,
        )


class ChatBody(OpenAIBody, ReasoningFields):
    """A conversation to answer."""

    messages: Annotated[list[MessageFields], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: str | ToolChoiceFields | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None

    def answer_options(self) -> AnswerOptions:
        """Return the options of its answers."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        n_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return replace(super().answer_options(), limit=limit, n_logprobs=n_logprobs)

    def chat_request(self) -> ChatRequest:
        """Return the conversation to answer."""
        use = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls, nested=True)
        reasoning = self.reasoning_options(self.reasoning_effort)
        messages = conversation("messages", enumerate(self.messages))
        return ChatRequest(messages, "messages", use, reasoning, self.wanted_format())


_Prompt = TypeVar("_Prompt")
Prompts = Annotated[list[_Prompt], Field(max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionBody(OpenAIBody):
    """A text to continue."""

    prompt: str | TokenIds | Annotated[Prompts[str], Field(min_length=1)] | Prompts[TokenIds]
    echo: Annotated[bool | None, refused()] = None
    suffix: str | None = None
    best_of: Whole | None = None
    logprobs: TopLogprobs | None = None

    def answer_options(self) -> AnswerOptions:
        """Return the options of its answers. With a suffix, the text is completed at an editor's cursor."""
        options = super().answer_options()
        return replace(options, n_logprobs=self.logprobs, is_interactive=bool(self.suffix))


async def _chat(service: Service, http: Request, body: ChatBody) -> Response:
    """Answer a conversation."""
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    prompt = await service.chat(await run_in_threadpool(body.chat_request))
    form = ChatForm(service.model_name, body, service.builder.vocabulary)
    return await service.respond(http, body, [prompt], form)


async def _complete(service: Service, http: Request, body: CompletionBody) -> Response:
    """Continue a text."""
    builder = service.builder
    if (body.best_of or 1) > (body.n or 1):
        raise not_supported("best_of", "this server does not rank completions; set n to as many as you want")
    given = body.prompt
    several = [given] if isinstance(given, str) or not given or isinstance(given[0], int) else given
    service.queue.check_number(len(several) * (body.n or 1))  # before they are tokenized
    texts = await run_in_threadpool(_tokenized, builder, several, body.suffix)
    prompts = await builder.continued(texts, body.wanted_format())
    form = CompletionForm(service.model_name, body, builder.vocabulary)
    return await service.respond(http, body, prompts, form)


def _tokenized(builder: RequestBuilder, several: Sequence[Any], suffix: str | None) -> list[TokenArray]:
    """Return the tokens of each prompt; with a suffix, those of the gap between both."""
    if suffix:
        texts = [each for each in several if isinstance(each, str)]
        if len(texts) < len(several):
            raise bad_field("suffix", "needs a prompt that is text")
        return [builder.infill_tokens(text, suffix) for text in texts]
    return [builder.tokenized(each) for each in several]


class ChatForm(Form):
    """Writes a `chat.completion` object or its chunks."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, body: OpenAIBody, vocabulary: LlamaVocabulary) -> None:
        options = body.chosen_options
        self._n, self._vocabulary, self._drafting = options.n, vocabulary, options.drafting
        self._with_logprobs = options.n_logprobs is not None
        self._with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._with_progress = body.return_progress is True
        head = {"id": new_id(f"{self.id_prefix}-"), "created": int(time.time()), "model": model}
        self._head: Data = {**head, "seed": options.seed}
        self._ends: dict[int, Finished] = {}
        self._n_calls: Counter[int] = Counter()  # of each choice

    def whole(self, answers: Sequence[WholeAnswer]) -> Data:
        """Return the response object."""
        ends = [answer.end for answer in answers]
        choices = [self._whole_choice(i, answer) for i, answer in enumerate(answers)]
        head = {**self._head, "object": self.kind, "choices": choices}
        return {**head, "usage": openai_usage(ends, self._n), **figures(ends[0], self._drafting)}

    def _begin(self) -> bytes:
        role = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk([_choice(i, role)]) for i in range(self._n))

    def _keep_alive(self, index: int, progress: PromptProgress) -> bytes:
        if not self._with_progress or progress.n_processed is None:
            return super()._keep_alive(index, progress)
        counts = {"total": progress.n_total, "cache": progress.n_cached, "processed": progress.n_processed}
        counts["time_ms"] = round(1e3 * progress.seconds)
        return self._chunk([self._part(index, None)], prompt_progress=counts)

    def _add(self, index: int, delta: Delta) -> bytes:
        more: Data = {}
        if self._drafting.spans and isinstance(delta, ContentDelta | ReasoningDelta):
            more["n_tokens"] = delta.n_tokens
        if self._drafting.spans and isinstance(delta, ContentDelta):
            more["spans"] = [{"text": span.text, "drafted": span.drafted} for span in delta.spans]
        return self._chunk([self._part(index, delta)], **more)

    def _finish(self, index: int, end: Finished) -> bytes:
        self._ends[index] = end
        last = {**self._part(index, None), "finish_reason": _reason(end, self._n_calls[index])}
        return self._chunk([last], **figures(end, self._drafting))

    def _end(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._with_usage:
            return done
        ends = [self._ends[i] for i in sorted(self._ends)]
        return self._chunk([], usage=openai_usage(ends, self._n)) + done

    def _chunk(self, choices: list[Data], **more: Any) -> bytes:
        return sse({**self._head, "object": self.chunk_kind, "choices": choices, **more})

    def _whole_choice(self, i: int, answer: WholeAnswer) -> Data:
        given = answer.message
        message: Data = {"role": "assistant", "content": given.text, "refusal": None}
        if given.reasoning:
            message["reasoning_content"] = given.reasoning
        if given.tool_calls:
            message["content"] = given.text or None
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in given.tool_calls
            ]
        reason = _reason(answer.end, len(given.tool_calls))
        return _choice(i, {"message": message}, self._logprobs(answer.logprobs), reason)

    def _part(self, i: int, delta: Delta | None) -> Data:
        """Return the choice of a chunk; without a delta, one that adds nothing."""
        logprobs, more = None, Data()
        if isinstance(delta, ContentDelta):
            logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
            more = {"content": delta.text}
        elif isinstance(delta, ReasoningDelta):
            more = {"reasoning_content": delta.text}
        elif isinstance(delta, CallDelta):
            self._n_calls[i] += 1
            function = {"name": delta.name, "arguments": ""}
            call = {"index": self._n_calls[i] - 1, "id": delta.id, "type": "function", "function": function}
            more = {"tool_calls": [call]}
        elif delta is not None:
            call = {"index": self._n_calls[i] - 1, "function": {"arguments": delta.text}}
            more = {"tool_calls": [call]}
        return _choice(i, {"delta": more}, logprobs)

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> Data | None:
        if not self._with_logprobs:
            return None
        return {"content": logprob_list(tokens, self._vocabulary), "refusal": None}


class CompletionForm(ChatForm):
    """Writes a `text_completion` object or its chunks."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def _begin(self) -> bytes:
        return b""

    def _whole_choice(self, i: int, answer: WholeAnswer) -> Data:
        text = {"text": answer.message.text}
        return _choice(i, text, self._logprobs(answer.logprobs), _reason(answer.end, 0))

    def _part(self, i: int, delta: Delta | None) -> Data:
        if delta is None:
            return _choice(i, {"text": ""}, self._logprobs(()))
        assert isinstance(delta, ContentDelta)  # a completion has neither reasoning nor calls
        return _choice(i, {"text": delta.text}, self._logprobs(delta.logprobs))

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> Data | None:
        """Return log-probabilities in columns. Offsets count the characters of the choice."""
        if not self._with_logprobs:
            return None
        listed = logprob_list(tokens, self._vocabulary)
        offsets = [each.begin for each in tokens if self._vocabulary.piece(each.token)]
        tops = [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in listed]
        names, logprobs = [each["token"] for each in listed], [each["logprob"] for each in listed]
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _choice(i: int, content: Data, logprobs: Data | None = None, reason: str | None = None) -> Data:
    return {"index": i, **content, "logprobs": logprobs, "finish_reason": reason}


def _reason(end: Finished, n_calls: int) -> str:
    return "length" if end.is_truncated else "tool_calls" if n_calls else "stop"


ENDPOINTS = (
    Endpoint("/v1/chat/completions", _chat, ChatBody),
    Endpoint("/v1/completions", _complete, CompletionBody),
)
