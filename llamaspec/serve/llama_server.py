"""`POST /completion` and `POST /infill`: llama-server's own API, which editors and many scripts use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from llamaspec.chat.infill import File, fitting_infill_prompt
from llamaspec.engine.generation import StopReason
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve import bodies, deltas
from llamaspec.serve.constraints import GenerationParameters
from llamaspec.serve.openai_chat import OpenAIBody
from llamaspec.serve.requests import RequestBuilder
from llamaspec.serve.scheduling import Finished
from llamaspec.serve.service import Form, event, parse_body, service_of
from llamaspec.values import TokenArray

MAX_FILES = 1024
USUAL_TOKENS = 128  # of a completion whose client does not say
_STOP_TYPES = {StopReason.END: "eos", StopReason.STOP: "word"}  # others are a "limit"


class FileFields(bodies.Fields):
    """Another file, or a part of one."""

    text: str
    filename: str | None = None


class NativeBody(OpenAIBody):
    """Fields of both endpoints."""

    n_predict: bodies.Count | Literal[-1, 0] | None = None  # 0: only process the prompt; -1: until the end
    t_max_predict_ms: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None  # 0: any time
    n_probs: bodies.TopLogprobs | None = None  # most probable tokens to return with each token
    response_fields: list[str] | None = None  # such as "timings/prompt_n"


class NativeCompletionBody(NativeBody):
    """A text to continue."""

    prompt: str | list[int | str]


class InfillBody(NativeBody):
    """A text around a cursor, and other files."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[FileFields], Field(max_length=MAX_FILES)] | None = None
    prompt: str | None = None  # more of the prefix: the line up to the cursor

    def prompt_tokens(self, vocabulary: LlamaVocabulary, context_size: int) -> TokenArray:
        """The prompt; PromptError if the model has no infill tokens."""
        n_predict = self.n_predict if self.n_predict is not None else self.max_tokens
        n_predict = USUAL_TOKENS if n_predict is None or n_predict < 0 else n_predict
        prefix = self.input_prefix + (self.prompt or "")
        files = [File(each.filename or "file", each.text) for each in self.input_extra or ()]
        room = context_size - min(n_predict, context_size // 4)
        return fitting_infill_prompt(vocabulary, prefix, self.input_suffix, files, room)


async def completion(http: Request) -> Response:
    """Continue a text."""
    service, body = service_of(http), await parse_body(http, NativeCompletionBody)
    builder = service.builder
    parts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    prompt = await run_in_threadpool(builder.mixed_prompt, parts)
    return await _respond(http, body, prompt, is_interactive=False)


async def infill(http: Request) -> Response:
    """Complete a text at the cursor."""
    service, body = service_of(http), await parse_body(http, InfillBody)
    size = service.pair.target.context_size
    prompt = await run_in_threadpool(body.prompt_tokens, service.builder.vocabulary, size)
    return await _respond(http, body, prompt, is_interactive=body.n_predict != 0)


async def _respond(http: Request, body: NativeBody, prompt: TokenArray, *, is_interactive: bool) -> Response:
    service, wanted = service_of(http), body.wanted_format()
    builder, only_reads = service.builder, body.n_predict == 0
    constraint = None if wanted is None else await builder.constraints.compile(wanted)
    (asked,) = builder.requests(
        [prompt], body, GenerationParameters(constraint=constraint), body.seed_or_random(),
        max_tokens=1 if only_reads else body.n_predict or body.max_tokens,
        stops=body.stops,
        n_logprobs=body.n_probs or None,
        prediction=await builder.prediction(body.predicted_text),
    )  # fmt: skip
    form = NativeForm(service.model_name, body, builder, only_reads=only_reads)
    seconds = None if not body.t_max_predict_ms else body.t_max_predict_ms / 1e3
    asked = replace(asked, is_interactive=is_interactive, max_seconds=seconds)
    return await service.respond(http, [asked], form, body.stream)


class NativeForm(Form):
    """llama-server's completion object and its parts."""

    def __init__(self, model: str, body: NativeBody, builder: RequestBuilder, *, only_reads: bool) -> None:
        self._model, self._body, self._builder, self._only_reads = model, body, builder, only_reads

    def whole(self, answers: Sequence[deltas.Answer]) -> dict[str, Any]:
        """The response object, or the fields of it that the client asked for."""
        (answer,) = answers
        content = "" if self._only_reads else answer.message.text
        whole = {**self._last(answer.end, content), **self._probabilities(answer.logprobs)}
        paths = self._body.response_fields
        return (
            whole if not paths else {path: value for path in paths if (value := _at(whole, path)) is not None}
        )

    def _add(self, index: int, delta: deltas.TextDelta) -> bytes:
        assert isinstance(delta, deltas.Content)  # a plain completion has neither reasoning nor calls
        part = {"index": index, "content": delta.text, **self._probabilities(delta.logprobs), "stop": False}
        return b"" if self._only_reads else event(part)

    def _probabilities(self, tokens: Sequence[deltas.TokenLogprobs]) -> dict[str, Any]:
        if not self._body.n_probs:
            return {}
        return {"completion_probabilities": deltas.logprob_list(tokens, self._builder.vocabulary)}

    def _finish(self, index: int, end: Finished) -> bytes:
        return event(self._last(end, ""))

    def _last(self, end: Finished, content: str) -> dict[str, Any]:
        done, reason = end.completion, end.completion.stop_reason
        stopping_word = (
            self._builder.matched_stop(done, self._body.stops) if reason is StopReason.STOP else None
        )
        return {
            "index": 0,
            "content": content,
            "stop": True,
            "model": self._model,
            "tokens_predicted": 0 if self._only_reads else done.summary.n_tokens,
            "tokens_evaluated": done.n_prompt_tokens,
            "tokens_cached": done.n_cached,
            "has_new_line": "\n" in done.text,
            "truncated": False,
            "stop_type": _STOP_TYPES.get(reason, "limit"),
            "stopping_word": stopping_word or "",
            **deltas.figures(end, self._body.drafting),
        }


def _at(data: Any, path: str) -> Any:
    """What lies at a path such as "timings/prompt_n"; None if nothing does."""
    for key in path.split("/"):
        data = data.get(key) if isinstance(data, dict) else None
    return data
