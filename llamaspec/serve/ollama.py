"""Ollama's API to generate: `/api/chat` and `/api/generate`. Its lists are in `ollama_models.py`.

Many desktop clients and editors support only this API. A stream has one JSON object per line. A call is sent
whole, with its arguments as an object. github.com/ollama/ollama/blob/main/docs/api.md,
tests/serve/test_ollama.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime, timezone
from time import monotonic_ns
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llamaspec.chat.attached import Attached
from llamaspec.chat.messages import ArgumentsDelta, CallDelta, Delta, Message, ReasoningDelta
from llamaspec.serve.bodies import (
    AnswerOptions,
    CacheSalt,
    GenerationBody,
    JsonObject,
    ModelBody,
    OneOrMoreStops,
    ReasoningFields,
    ReasoningOptions,
    Whole,
)
from llamaspec.serve.constraints import Prompt, ResponseFormat
from llamaspec.serve.durations import seconds_of
from llamaspec.serve.http_errors import bad_field, not_supported, ollama_error
from llamaspec.serve.jobs import ChatRequest, RequestBuilder
from llamaspec.serve.message_fields import (
    MAX_MESSAGES,
    MessageFields,
    Tools,
    ToolUse,
    conversation,
    system_message,
    tool_use,
)
from llamaspec.serve.request_queue import Finished, PromptProgress
from llamaspec.serve.response_forms import Data, Form, WholeAnswer, arguments_of, as_line
from llamaspec.serve.service import Endpoint, Service
from llamaspec.values import TokenArray

LOADING_SINCE = "llamaspec.loading_since"  # key of a request's scope: when loading began, in nanoseconds


class OllamaOptions(GenerationBody):
    """`options` of a request."""

    stop: OneOrMoreStops | None = None
    num_predict: Annotated[Whole, Field(ge=-1 << 31, lt=1 << 31)] | None = None  # below 0: as many as fit

    def answer_options(self) -> AnswerOptions:
        """Return the options of its answer."""
        return AnswerOptions(limit=self.num_predict or None, stops=self.stop or ())


class KeptBody(ModelBody):
    """A request that may say how long its model stays loaded."""

    keep_alive: float | str | None = None  # a duration

    @property
    def idle_seconds(self) -> float | None:
        """For how long the model stays loaded afterwards."""
        if self.keep_alive in (None, ""):
            return None
        try:
            return seconds_of(self.keep_alive or 0)
        except ValueError as error:
            raise bad_field("keep_alive", str(error)) from error


class OllamaBody(KeptBody, ABC):
    """Fields of `/api/chat` and `/api/generate`."""

    is_chat: ClassVar[bool]

    stream: bool | None = None
    options: OllamaOptions | None = None
    format: Literal["", "json"] | JsonObject | None = None
    think: bool | Literal["true", "false", "low", "medium", "high", "max"] | None = None
    cache_salt: CacheSalt | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream."""
        return self.stream is not False

    @property
    @abstractmethod
    def has_prompt(self) -> bool:
        """Whether there is something to answer; otherwise the model is only loaded or unloaded."""

    def unloaded(self, model: str) -> dict[str, Any] | None:
        """Return the response if the request only unloads its model, otherwise None."""
        if self.has_prompt or self.idle_seconds != 0:
            return None
        return OllamaForm(model, is_chat=self.is_chat).without_prompt("unload")

    def wanted_format(self) -> ResponseFormat | None:
        """Return the format of the answer, if one is given."""
        if not self.format:
            return None
        schema = {"type": "object"} if self.format == "json" else self.format
        return ResponseFormat.of_schema(schema, "format", "format")

    @property
    def reasoning(self) -> ReasoningOptions:
        """How the model reasons."""
        words: dict[object, bool] = {"true": True, "false": False}  # some clients send words
        think = words.get(self.think, self.think)
        fields = ReasoningFields(enable_thinking=None if think is None else bool(think))
        return fields.reasoning_options(think if isinstance(think, str) else None)


class OllamaMessage(MessageFields):
    """A message of a conversation. Ollama has its own names for the tool and the reasoning."""

    name: Annotated[str | None, Field(alias="tool_name")] = None
    reasoning_content: Annotated[str | None, Field(alias="thinking")] = None
    images: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_images_as_parts(cls, given: Any) -> Any:
        """Make images parts of the content, as in the other APIs."""
        images = given.get("images") if isinstance(given, dict) else None
        if not images or not isinstance(images, list) or not isinstance(given.get("content", ""), str):
            return given
        text = {"type": "text", "text": given.get("content", "")}
        pictures = ({"type": "image", "source": {"data": each}} for each in images)
        return {**given, "content": [text, *pictures], "images": None}


class OllamaChatBody(OllamaBody):
    """A conversation to answer. Without messages, the client only wants the model to be loaded."""

    is_chat = True

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None

    @property
    def has_prompt(self) -> bool:
        """Whether there is something to answer."""
        return bool(self.messages)

    def chat_request(self) -> ChatRequest:
        """Return the conversation to answer."""
        messages = conversation("messages", enumerate(self.messages or ()))
        use = tool_use(self.tools, None, None, nested=True)
        return ChatRequest(messages, "messages", use, self.reasoning, self.wanted_format())


class OllamaGenerateBody(OllamaBody):
    """A prompt: a user message; with `raw` or `suffix`, text to continue."""

    is_chat = False

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Annotated[list[str], Field(max_length=MAX_MESSAGES)] | None = None

    @property
    def has_prompt(self) -> bool:
        """Whether there is something to answer."""
        return bool(self.prompt)

    def chat_request(self) -> ChatRequest:
        """Return the conversation to answer."""
        pictures = tuple(Attached(each, place=f"images.{i}") for i, each in enumerate(self.images or ()))
        text = (self.prompt or "") + "".join(each.mark for each in pictures)
        messages = [Message("user", text, pictures=pictures, place="prompt")]
        if self.system:
            messages.insert(0, system_message(self.system, "system"))
        return ChatRequest(messages, "prompt", ToolUse(), self.reasoning, self.wanted_format())


async def _chat(service: Service, http: Request, body: OllamaChatBody) -> Response:
    """Answer a conversation."""
    form = OllamaForm(service.model_name, is_chat=True, loading_since=http.scope.get(LOADING_SINCE))
    if not body.has_prompt:
        return JSONResponse(form.without_prompt("load"))
    prompt = await service.chat(await run_in_threadpool(body.chat_request))
    return await _respond(service, http, body, prompt, form)


async def _generate(service: Service, http: Request, body: OllamaGenerateBody) -> Response:
    """Answer a prompt, or continue a text."""
    builder = service.builder
    form = OllamaForm(service.model_name, is_chat=False, loading_since=http.scope.get(LOADING_SINCE))
    if body.prompt is None or not body.has_prompt:
        return JSONResponse(form.without_prompt("load"))
    if not (body.raw or body.suffix or builder.template is None):
        prompt = await service.chat(await run_in_threadpool(body.chat_request))
    else:
        if body.images:
            raise not_supported("images", "only a chat shows pictures; drop raw and suffix")
        tokens = await run_in_threadpool(_tokenized, builder, body.prompt, body.suffix)
        (prompt,) = await builder.continued([tokens], body.wanted_format())
    return await _respond(service, http, body, prompt, form)


def _tokenized(builder: RequestBuilder, text: str, suffix: str | None) -> TokenArray:
    return builder.infill_tokens(text, suffix) if suffix else builder.tokenized(text)


async def _respond(
    service: Service, http: Request, body: OllamaBody, prompt: Prompt, form: OllamaForm
) -> Response:
    options = body.options or OllamaOptions()
    update = {"stream": body.is_streamed, "cache_salt": body.cache_salt or options.cache_salt}
    return await service.respond(http, options.model_copy(update=update), [prompt], form)


def time_of(seconds: float | None = None) -> str:
    """Return a time, or now, as Ollama writes it; `seconds` are Unix seconds."""
    moment = datetime.now(timezone.utc) if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat().replace("+00:00", "Z")


class OllamaForm(Form):
    """Writes the responses of `/api/chat` or `/api/generate`. A stream has one JSON object per line."""

    media_type = "application/x-ndjson"

    def __init__(self, model: str, *, is_chat: bool, loading_since: int | None = None) -> None:
        self._model, self._is_chat, now = model, is_chat, monotonic_ns()
        self._begin_ns = now if loading_since is None else loading_since
        self._load_ns = now - self._begin_ns
        self._call: CallDelta | None = None  # not complete yet
        self._arguments = ""  # of this call

    def _part(self, content: str, thinking: str = "", calls: Sequence[Data] = ()) -> Data:
        """Return the fields that hold a part of the answer."""
        more: Data = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": content, **more}
        if calls:
            more["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": content, **more}}

    def without_prompt(self, reason: Literal["load", "unload"]) -> Data:
        """Return the response to a request without a prompt, which loaded or unloaded the model."""
        return {**self._head(), **self._part(""), "done": True, "done_reason": reason}

    def waiting(self) -> bytes:
        """Return a part without content, while the model is loading."""
        return self._line(**self._part(""), done=False)

    def whole(self, answers: Sequence[WholeAnswer]) -> Data:
        """Return the response object."""
        (answer,) = answers
        message = answer.message
        calls = [_call(call.id, call.name, call.arguments) for call in message.tool_calls]
        part = self._part(message.text, message.reasoning or "", calls)
        return {**self._head(), **part, **self._last(answer.end)}

    def _keep_alive(self, index: int, progress: PromptProgress) -> bytes:
        return self.waiting()

    def _add(self, index: int, delta: Delta) -> bytes:
        if isinstance(delta, ArgumentsDelta):
            self._arguments += delta.text
            return b""
        call = self._complete_call()
        if isinstance(delta, CallDelta):
            self._call = delta
            return call
        part = self._part("", delta.text) if isinstance(delta, ReasoningDelta) else self._part(delta.text)
        return call + self._line(**part, done=False)

    def _finish(self, index: int, end: Finished) -> bytes:
        return self._complete_call() + self._line(**self._part(""), **self._last(end))

    def _error(self, exception: Exception) -> bytes:
        return _error_line(exception)

    def _complete_call(self) -> bytes:
        """Return the line of the call that has been collected, if there is one."""
        call, arguments, self._call, self._arguments = self._call, self._arguments, None, ""
        if call is None:
            return b""
        return self._line(**self._part("", calls=[_call(call.id, call.name, arguments)]), done=False)

    def _head(self) -> Data:
        return {"model": self._model, "created_at": time_of()}

    def _line(self, **more: Any) -> bytes:
        return f"{as_line({**self._head(), **more})}\n".encode()

    def _last(self, end: Finished) -> Data:
        done = end.completion
        return {
            "done": True,
            "done_reason": "length" if end.is_truncated else "stop",
            "total_duration": monotonic_ns() - self._begin_ns,  # durations are in nanoseconds
            "load_duration": self._load_ns,
            "prompt_eval_count": done.n_prompt_tokens,
            "prompt_eval_duration": round(1e9 * done.prefill_seconds),
            "eval_count": done.summary.n_tokens,
            "eval_duration": round(1e9 * done.summary.decode_seconds),
        }


def _error_line(error: Exception) -> bytes:
    return f"{as_line(ollama_error(error))}\n".encode()


def _failure(model: str, body: OllamaBody, error: Exception) -> bytes:
    return _error_line(error)


def _call(call_id: str, name: str, arguments: str) -> Data:
    return {"id": call_id, "function": {"name": name, "arguments": arguments_of(arguments)}}


ENDPOINTS = (
    Endpoint("/api/chat", _chat, OllamaChatBody, failure=_failure),
    Endpoint("/api/generate", _generate, OllamaGenerateBody, failure=_failure),
)
