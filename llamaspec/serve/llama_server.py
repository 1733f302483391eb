"""llama-server's own API, for editors and scripts: completions and the tokenizer.

tests/serve/test_infill.py, tests/serve/test_status.py.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from llamaspec.chat.infill import File, fitting_infill_prompt
from llamaspec.chat.messages import ContentDelta, Delta, TokenLogprobs
from llamaspec.engine.completion import StopReason
from llamaspec.llama.file_facts import OFFERED
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.bodies import (
    AnswerOptions,
    Fields,
    Limit,
    ModelBody,
    TokenIds,
    TopLogprobs,
    Whole,
    check_token_ids,
)
from llamaspec.serve.http_errors import not_supported
from llamaspec.serve.jobs import RequestBuilder
from llamaspec.serve.openai_chat import ChatBody, OpenAIBody
from llamaspec.serve.request_queue import Finished
from llamaspec.serve.response_forms import Data, Form, WholeAnswer, figures, logprob_list, sse
from llamaspec.serve.served_model import AnyService
from llamaspec.serve.service import Endpoint, Service
from llamaspec.values import TokenArray

MAX_FILES = 1024
MAX_FIELDS = 64
PART = 8192  # tokens of an answer that are written at once
USUAL_TOKENS = 128  # to make room for in the context, if the client sets no limit
_JSON = "application/json"
_STOP_TYPES = {StopReason.END: "eos", StopReason.STOP: "word"}  # "limit" for all others


class FileFields(Fields):
    """Another file, or a part of one."""

    text: str
    filename: str | None = None


class NativeBody(OpenAIBody):
    """Fields of `/completion` and `/infill`."""

    n: Literal[1] | None = None  # the response has room for one answer
    n_predict: Limit | None = None
    t_max_predict_ms: Annotated[Whole, Field(ge=0, lt=1 << 31)] | None = None  # 0: no limit
    n_probs: TopLogprobs | None = None  # most probable tokens to list with each token
    response_fields: Annotated[list[str], Field(max_length=MAX_FIELDS)] | None = (
        None  # such as "timings/prompt_n"
    )

    @property
    def limit(self) -> int | None:
        """The maximum number of tokens."""
        return self.max_tokens if self.n_predict is None else self.n_predict

    def answer_options(self) -> AnswerOptions:
        """Return the options of its answer."""
        return replace(
            super().answer_options(),
            limit=self.limit,
            n_logprobs=self.n_probs or None,
            max_seconds=self.t_max_predict_ms / 1e3 if self.t_max_predict_ms else None,
        )


class NativeCompletionBody(NativeBody):
    """A text to continue."""

    prompt: str | Annotated[list[int | str], Field(fail_fast=True)]


class InfillBody(NativeBody):
    """The text around a cursor, and other files."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[FileFields], Field(max_length=MAX_FILES)] | None = None
    prompt: str | None = None  # the end of the prefix: the line up to the cursor

    def answer_options(self) -> AnswerOptions:
        """Return the options of its answer. An editor waits for it at the cursor."""
        return replace(super().answer_options(), is_interactive=self.limit != 0)

    def prompt_tokens(self, vocabulary: LlamaVocabulary, context_size: int) -> TokenArray:
        """Return the prompt; PromptError if the model has no infill tokens."""
        n_predict = USUAL_TOKENS if self.limit is None or self.limit < 0 else self.limit
        prefix = self.input_prefix + (self.prompt or "")
        files = [File(each.filename or "file", each.text) for each in self.input_extra or ()]
        room = context_size - min(n_predict, context_size // 4)
        return fitting_infill_prompt(vocabulary, prefix, self.input_suffix, files, room)


async def _complete(service: Service, http: Request, body: NativeCompletionBody) -> Response:
    """Continue a text."""
    given = body.prompt
    if isinstance(given, list) and len(given) > 1 and all(isinstance(part, str) for part in given):
        remedy = "send a request for each, or use /v1/completions"
        raise not_supported("prompt", f"takes one prompt at this endpoint; {remedy}")
    text = await run_in_threadpool(service.builder.tokenized, given)
    return await _respond(service, http, body, text)


async def _infill(service: Service, http: Request, body: InfillBody) -> Response:
    """Complete a text at the cursor."""
    size = service.pair.target.context_size
    text = await run_in_threadpool(body.prompt_tokens, service.builder.vocabulary, size)
    return await _respond(service, http, body, text)


async def _respond(service: Service, http: Request, body: NativeBody, text: TokenArray) -> Response:
    prompts = await service.builder.continued([text], body.wanted_format())
    form = NativeForm(service.model_name, body, service.builder)
    return await service.respond(http, body, prompts, form)


class NativeForm(Form):
    """Writes llama-server's completion object or its parts."""

    def __init__(self, model: str, body: NativeBody, builder: RequestBuilder) -> None:
        self._model, self._body, self._builder = model, body, builder
        self._options = body.chosen_options

    def whole(self, answers: Sequence[WholeAnswer]) -> Data:
        """Return the response object, or those of its fields that the client asked for."""
        (answer,) = answers
        whole = {**self._last(answer.end, answer.message.text), **self._probabilities(answer.logprobs)}
        paths = self._body.response_fields
        if not paths:
            return whole
        return {path: value for path in paths if (value := _at(whole, path)) is not None}

    def _add(self, index: int, delta: Delta) -> bytes:
        assert isinstance(delta, ContentDelta)  # a plain completion has neither reasoning nor calls
        part = {"index": index, "content": delta.text, **self._probabilities(delta.logprobs), "stop": False}
        return sse(part)

    def _probabilities(self, tokens: Sequence[TokenLogprobs]) -> Data:
        if not self._body.n_probs:
            return {}
        return {"completion_probabilities": logprob_list(tokens, self._builder.vocabulary)}

    def _finish(self, index: int, end: Finished) -> bytes:
        return sse(self._last(end, ""))

    def _last(self, end: Finished, content: str) -> Data:
        done, reason = end.completion, end.completion.stop_reason
        return {
            "index": 0,
            "content": content,
            "stop": True,
            "model": self._model,
            "tokens_predicted": done.summary.n_tokens,
            "tokens_evaluated": done.n_prompt_tokens,
            "tokens_cached": done.n_cached,
            "has_new_line": "\n" in done.text,
            "truncated": False,
            "stop_type": _STOP_TYPES.get(reason, "limit"),
            "stopping_word": self._builder.matched_stop(done, self._options.stops) or "",
            **figures(end, self._options.drafting),
        }


def _at(data: Any, path: str) -> Any:
    """Return the value at a path such as "timings/prompt_n"; None if there is none."""
    for key in path.split("/"):
        data = data.get(key) if isinstance(data, dict) else None
    return data


# The tokenizer.


class TokenizeBody(ModelBody):
    """Text to tokenize."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None  # null: true, as for prompts
    with_pieces: bool | None = None


class DetokenizeBody(ModelBody):
    """Tokens to turn into text."""

    tokens: TokenIds


async def _tokenize(service: AnyService, _: Request, body: TokenizeBody) -> Response:
    vocabulary = service.target.vocabulary
    content, special = body.content.encode(), bool(body.add_special)
    marks = body.parse_special is not False
    ids = await run_in_threadpool(vocabulary.tokenize, content, add_special=special, parse_special=marks)
    return StreamingResponse(_token_list(vocabulary, ids, bool(body.with_pieces)), media_type=_JSON)


def _token_list(vocabulary: LlamaVocabulary, ids: TokenArray, with_pieces: bool) -> Iterator[str]:
    """Write the answer in parts. Starlette runs this outside the event loop."""
    yield '{"tokens":['
    for begin in range(0, len(ids), PART):
        part: list[Any] = ids[begin : begin + PART].tolist()
        if with_pieces:
            part = [{"id": i, "piece": _piece(vocabulary.piece(i))} for i in part]
        yield ("," if begin else "") + json.dumps(part, ensure_ascii=False, separators=(",", ":"))[1:-1]
    yield "]}"


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def _detokenize(service: AnyService, _: Request, body: DetokenizeBody) -> Response:
    vocabulary = service.target.vocabulary
    await run_in_threadpool(check_token_ids, body.tokens, vocabulary, "tokens")
    return StreamingResponse(_text_of(vocabulary, body.tokens), media_type=_JSON)


def _text_of(vocabulary: LlamaVocabulary, tokens: Sequence[int]) -> Iterator[str]:
    """Write the answer in parts, which end between two characters."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    yield '{"content":"'
    for begin in range(0, len(tokens), PART):
        pieces = b"".join(map(vocabulary.piece, tokens[begin : begin + PART]))
        yield json.dumps(decoder.decode(pieces), ensure_ascii=False)[1:-1]
    yield json.dumps(decoder.decode(b"", final=True), ensure_ascii=False)[1:-1] + '"}'


# Models, and chat templates.


class NamedModelBody(ModelBody):
    """A request to load a model."""

    model: str


class UnloadBody(NamedModelBody):
    """A request to unload a model."""

    def unloaded(self, model: str) -> dict[str, Any]:
        """Return the response to a request that only unloads its model."""
        return {"success": True}


async def _loaded(*_: object) -> Response:
    """Answer once the model is loaded; unlike llama-server, whose answer comes before."""
    return JSONResponse({"success": True})


async def _apply_template(service: Service, _: Request, body: ChatBody) -> Response:
    """Return the prompt that a conversation becomes."""
    request = await run_in_threadpool(body.chat_request)
    prompt = await service.builder.rendered(request, must_fit=False)
    vocabulary = service.builder.vocabulary

    def text() -> str:
        tokens = prompt.tokens.tolist()
        return b"".join(vocabulary.piece(i) or vocabulary.text(i) for i in tokens).decode(errors="replace")

    return JSONResponse({"prompt": await run_in_threadpool(text)})


ENDPOINTS = (
    Endpoint("/models/load", _loaded, NamedModelBody, kinds=OFFERED),
    Endpoint("/models/unload", _loaded, UnloadBody, kinds=OFFERED),
    Endpoint("/apply-template", _apply_template, ChatBody),
    Endpoint("/completion", _complete, NativeCompletionBody),
    Endpoint("/infill", _infill, InfillBody),
    Endpoint("/tokenize", _tokenize, TokenizeBody, kinds=OFFERED),
    Endpoint("/detokenize", _detokenize, DetokenizeBody, kinds=OFFERED),
)
