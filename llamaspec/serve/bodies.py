"""Request bodies: safe parsing, and the fields that the APIs share.

Unknown fields are ignored, as in llama-server; a known field with a wrong value is refused.
tests/serve/test_bad_requests.py, tests/serve/test_fields.py.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from llamaspec.chat.messages import finite
from llamaspec.llama.options import MAX_DRAFT
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.sampling.filters import Sampling
from llamaspec.serve import ServeSettings
from llamaspec.serve.compression import IDENTITY, decompressed
from llamaspec.serve.http_errors import UNSUPPORTED, RequestError, bad_field, invalid

MAX_STOPS = 32
MAX_BIASES = 1000
MAX_VARIABLES = 1000  # values in the variables of a chat template, at all depths
MAX_VALUES = 50_000  # in a schema or the arguments of a call, at all depths
MAX_CONTAINERS = 100_000  # lists and objects in a body
LONG_BYTES = 1 << 16  # of a body that is checked outside the event loop
_ALL_TOKENS = (1 << 31) - 1
_NEVER = -1e30  # bias of a token that must not be drawn
_NUMBER = re.compile(r"[+-]?[0-9]+")
_TINY_TOP_P = 1e-9  # stands for a top-p of 0: keeps only the most probable token
_Body = TypeVar("_Body", bound="Fields")


def _whole(given: Any) -> Any:
    """Turn 40.0 into 40: some clients have only one type of numbers."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=MAX_STOPS)]
OneOrMoreStops = Annotated[Stops, BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]
BiasedText = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)] | Literal[False]  # false: never draw the token
Biases = Annotated[dict[BiasedText, Bias], Field(max_length=MAX_BIASES)]
BiasPairs = Annotated[list[tuple[int | BiasedText, Bias]], Field(max_length=MAX_BIASES, fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]  # one error, not millions
Whole = Annotated[int, BeforeValidator(_whole)]  # also 40.0
Limit = Annotated[Whole, Field(ge=-1, lt=1 << 31)]  # tokens; 0: only process the prompt, -1: as many as fit
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]  # cached tokens serve only the same salt
TopLogprobs = Annotated[Whole, Field(ge=0, le=20)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Of an image or a file, perhaps with escapes. A run has only one place to begin, so that time is linear.
_BASE64 = re.compile(rb'(?<=[",])[A-Za-z0-9+/=_\\-]{1024,}')

# One thread, so one body at a time: the values in 8 MiB of JSON may take more than 100 MiB.
_checker = ThreadPoolExecutor(1, thread_name_prefix="llamaspec-body")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # `"?`, so that it never looks twice
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# JSON escapes: a surrogate pair, half of one, any other.
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def without_half_pairs(body: bytes) -> bytes:
    """Return a JSON text with U+FFFD for each half of a surrogate pair.

    JavaScript clients split an emoji when they truncate a string, and send the half in every later request.
    """
    if _SURROGATE.search(body) is None:
        return body
    return _ESCAPES.sub(lambda found: rb"\ufffd" if found[1] else found[0], body)


async def parse_body(http: Request, kind: type[_Body], settings: ServeSettings) -> _Body:
    """Return the checked body of a request; RequestError if it is wrong, too large or too slow."""
    encoding = http.headers.get("content-encoding", IDENTITY).strip().lower()
    limit, seconds = settings.body_bytes + settings.base64_bytes, settings.body_seconds
    try:
        body = await asyncio.wait_for(_read(http, limit), seconds)
    except asyncio.TimeoutError:
        raise RequestError(408, f"the body did not arrive within {seconds:g} seconds") from None

    def checked() -> _Body:
        plain = body if encoding == IDENTITY else decompressed(body, encoding, limit)
        return _checked(kind, plain, settings.body_bytes)

    if len(body) <= LONG_BYTES and encoding == IDENTITY:
        return checked()
    return await asyncio.get_running_loop().run_in_executor(_checker, checked)


def _checked(kind: type[_Body], body: bytes, limit: int) -> _Body:
    if (
        len(body) > limit
        and len(body) - sum(run.end() - run.start() for run in _BASE64.finditer(body)) > limit
    ):
        raise _too_large(limit)
    if _has_many_containers(body):
        raise RequestError(400, f"the body has more than {MAX_CONTAINERS:,} lists and objects")
    try:
        return kind.model_validate_json(without_half_pairs(body))
    except ValidationError as error:
        raise invalid(error) from error


def _has_many_containers(body: bytes) -> bool:
    """Whether a body has too many lists and objects. Of a wrong value, pydantic copies all, for seconds."""

    def is_over(text: bytes) -> bool:
        return text.count(b"[") + text.count(b"{") > MAX_CONTAINERS

    return is_over(body) and is_over(_STRING.sub(b"", body))


async def _read(http: Request, limit: int) -> bytes:
    length, body = http.headers.get("content-length", "0"), bytearray()
    if length.isascii() and length.isdigit() and int(length) > limit:  # without waiting for it
        raise _too_large(limit)
    async for chunk in http.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"the body is larger than {limit} bytes")


def refused(message: str = "not supported yet") -> AfterValidator:
    """Return a validator for a field that must be missing, null, false or empty."""

    def check(value: Any) -> Any:
        if value:
            raise PydanticCustomError(UNSUPPORTED, message)
        return value

    return AfterValidator(check)


def at_most(limit: int) -> AfterValidator:
    """Return a validator for a JSON value of at most `limit` values at all depths; see `finite`."""

    def check(given: Any) -> Any:
        left, n_values = [given], 0
        while left:
            value = left.pop()
            if isinstance(value, dict | list):
                n_values += len(value)
                if n_values > limit:
                    raise PydanticCustomError("too_long", f"has more than {limit} values")
                left += value.values() if isinstance(value, dict) else value
        return finite(given)

    return AfterValidator(check)


JsonObject = Annotated[dict[str, Any], at_most(MAX_VALUES)]
JsonList = Annotated[list[Any], at_most(MAX_VALUES)]


def check_token_ids(tokens: Sequence[int], vocabulary: LlamaVocabulary, field: str) -> None:
    """Raise a RequestError if a token id is outside the vocabulary."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary.size:
        raise bad_field(field, f"token ids must be from 0 to {vocabulary.size - 1}")


class Fields(BaseModel):
    """A JSON object in a request."""

    # By default, pydantic caches up to 16,384 short strings, which would be text from clients.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, cache_strings="none")


class ModelBody(Fields):
    """The body of a request that names a model; without a name, it means the last one that was used."""

    model: Annotated[str | None, BeforeValidator(lambda given: given if isinstance(given, str) else None)] = (
        None
    )

    @property
    def is_streamed(self) -> bool:
        """Whether the response is a stream."""
        return False

    @property
    def idle_seconds(self) -> float | None:
        """For how long the model stays loaded afterwards; infinite: until the end; None: not given."""
        return None

    def unloaded(self, model: str) -> dict[str, Any] | None:
        """Return the response if the request only unloads its model, otherwise None."""
        return None


class FieldsByType(Fields):
    """An object of one of several types. Of unknown types, only the field `type` is parsed."""

    known: ClassVar[Sequence[str]]  # types

    @model_validator(mode="before")
    @classmethod
    def _only_type(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        return {"type": kind} if isinstance(kind, str) and kind not in cls.known else given


class SpeculativeFields(Fields):
    """How to draft. Under the coupled rule the completion does not depend on these fields."""

    enabled: bool | None = None
    max_draft: Annotated[Whole, Field(ge=0, le=MAX_DRAFT)] | None = None
    rule: Literal["coupled", "rejection", "block"] | None = None
    ngram: bool | None = None
    spans: bool | None = None  # mark drafted text in the stream
    rounds: bool | None = None  # list the evaluations of the target


class SamplingFields(Fields):
    """How to sample tokens. Null and missing fields have the model's defaults, or llama.cpp's."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1, lt=1 << 31)] | None = None
    seed: Annotated[Whole, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    logit_bias: Biases | BiasPairs | None = None
    ignore_eos: bool | None = None
    speculative: SpeculativeFields | None = None

    def biases(self, vocabulary: LlamaVocabulary) -> dict[int, float]:
        """Return the bias of each token's logit; the bias of a string applies to each of its tokens."""
        given, found = self.logit_bias or (), dict[int, float]()
        for name, bias in given.items() if isinstance(given, dict) else given:
            if isinstance(name, int) or _NUMBER.fullmatch(name):
                tokens = [int(name)]
            else:
                tokens = vocabulary.tokenize(name.encode(), add_special=False).tolist()
            for token in tokens:
                found[token] = found.get(token, 0.0) + (_NEVER if bias is False else bias)
        return found | dict.fromkeys(vocabulary.ends, _NEVER) if self.ignore_eos else found

    def sampling(
        self, biases: Mapping[int, float] | None = None, default: Sampling | None = None
    ) -> Sampling:
        """Return the sampling parameters; `default` has those that the request does not give."""
        default = default or Sampling()

        def given(name: str) -> Any:
            value = getattr(self, name)
            return getattr(default, name) if value is None else value

        top_p, top_k = given("top_p"), given("top_k")
        is_penalised = self.repeat_last_n != 0
        repeat_penalty = given("repeat_penalty") if given("repeat_penalty") != 1 else None
        return Sampling(
            temperature=given("temperature"),
            top_k=top_k if top_k is not None and top_k > 0 else None,
            top_p=None if top_p in (None, 1) else max(top_p, _TINY_TOP_P),
            min_p=given("min_p") or None,
            repeat_penalty=repeat_penalty if is_penalised else None,
            presence_penalty=(is_penalised and given("presence_penalty")) or None,
            frequency_penalty=(is_penalised and given("frequency_penalty")) or None,
            penalty_window=self._penalty_window(repeat_penalty),
            logit_bias=biases or None,
        )

    def _penalty_window(self, repeat_penalty: float | None) -> int | None:
        """Return how many last tokens penalties cover; None, for OpenAI's two alone: all generated ones."""
        if self.repeat_last_n is None and repeat_penalty is None:
            return None
        if self.repeat_last_n == -1:
            return _ALL_TOKENS
        return self.repeat_last_n or Sampling().penalty_window


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options of the answers to a request, in the same form for every API."""

    limit: int | None = None  # maximum number of tokens; None or negative: as many as fit; 0: see `Limit`
    seed: int = 0
    n: int = 1  # answers to each prompt; answer i uses seed + i
    stops: Sequence[str] = ()
    n_logprobs: int | None = None  # most probable tokens to list with each token; None: no log-probabilities
    prediction: str | None = None  # text that the answer is expected to mostly repeat
    is_interactive: bool = False  # an editor waits for it at the cursor: it goes before others
    max_seconds: float | None = None  # after the first token; the answer then ends once it has a whole line
    drafting: SpeculativeFields = field(default_factory=SpeculativeFields)


class GenerationBody(SamplingFields, ModelBody, ABC):
    """A request to generate an answer."""

    stream: bool | None = None
    cache_salt: CacheSalt | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream."""
        return bool(self.stream)

    @cached_property
    def chosen_options(self) -> AnswerOptions:
        """The options of its answers, made once. The seed is a random one if it is -1 or missing."""
        seed = secrets.randbits(32) if self.seed is None or self.seed == -1 else self.seed
        drafting = self.speculative or SpeculativeFields()
        return replace(self.answer_options(), seed=seed, drafting=drafting)

    @abstractmethod
    def answer_options(self) -> AnswerOptions:
        """Return the options of its answers, without those that all APIs share."""


class ReasoningOptions(NamedTuple):
    """How the model reasons before it answers."""

    template_kwargs: Mapping[str, Any]  # variables of the chat template
    budget: int | None  # maximum number of tokens; 0: no reasoning, None: not given


class ReasoningFields(Fields):
    """Fields that control reasoning, in every chat API."""

    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(MAX_VARIABLES)] = None
    enable_thinking: bool | None = None
    thinking_budget_tokens: Annotated[Whole, Field(ge=-1, lt=1 << 31)] | None = None

    def reasoning_options(
        self, effort: str | None = None, budget: int | None = None, off: bool = False
    ) -> ReasoningOptions:
        """Combine these fields with those of one API: OpenAI's effort; Anthropic's budget, or `off`."""
        kwargs = dict(self.chat_template_kwargs or {})
        if effort is not None and effort != "none":
            kwargs.setdefault("reasoning_effort", {"minimal": "low", "xhigh": "high"}.get(effort, effort))
        enabled = self.enable_thinking if self.enable_thinking is not None else kwargs.get("enable_thinking")
        if off or effort == "none":
            enabled = False
        if enabled is not None:
            kwargs["enable_thinking"] = enabled
        if self.thinking_budget_tokens is not None:
            n = self.thinking_budget_tokens
            budget = _ALL_TOKENS if n < 0 else n
        return ReasoningOptions(kwargs, 0 if enabled is False else budget)
