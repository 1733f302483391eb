"""Request bodies: fields that the APIs share, and the conversation they hold.

Unknown fields are ignored, as llama-server does; a known field with a wrong value is refused.
tests/serve/test_bad_requests.py, tests/serve/test_fields.py.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from llamaspec.chat.template import Message, ToolCall
from llamaspec.llama.options import MAX_DRAFT
from llamaspec.sampling.filters import Sampling
from llamaspec.serve.errors import bad_field, not_supported

_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")  # types of parts
_PARTS = (*_TEXTS, "thinking", "redacted_thinking", "tool_use", "tool_result")  # those that are read
MAX_STOPS = 32
MAX_MESSAGES = 4096
_ALL_TOKENS = (1 << 31) - 1
_NEVER = -1e30  # bias of a token that must not be drawn
# Claude Code begins the system prompt with it. Its values differ in each request, and behind the first token
# that differs nothing comes out of the KV cache. github.com/ggml-org/llama.cpp/pull/21793
_BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:(\s*[\w-]+=[^;\s]*;)*\s*")
_NUMBER = re.compile(r"[+-]?[0-9]+")
_TINY_TOP_P = 1e-9  # a top-p of 0: only the most probable token

StopText = Annotated[str, Field(min_length=1, max_length=1024)]
BiasedText = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)] | Literal[False]  # false: never
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
CountOrAny = Count | Literal[-1]  # -1 as llama-server: as many as fit
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


# Strings, the last of which may be cut off, and brackets outside of them.
_JSON_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def json_depth(body: bytes, limit: int) -> int:
    """How deep the brackets of a JSON text are nested; counting stops behind `limit`."""
    deepest = level = 0
    for found in _JSON_TOKENS.finditer(body):
        if (first := found[0][:1]) in b"[{":
            level += 1
            deepest = max(deepest, level)
            if deepest > limit:
                break
        elif first in b"]}":
            level -= 1
    return deepest


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# Escapes of JSON: a pair of surrogates, half of one, any other.
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def without_half_pairs(body: bytes) -> bytes:
    """A JSON text with U+FFFD for each half of a surrogate pair.

    Clients in JavaScript that shorten a text cut emoji in two, and send the half in every later request.
    """
    if _SURROGATE.search(body) is None:
        return body
    return _ESCAPES.sub(lambda found: rb"\ufffd" if found[1] else found[0], body)


# Fields.


class Fields(BaseModel):
    """A JSON object in a request."""

    # By default pydantic keeps up to 16,384 short strings of clients in a cache.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, cache_strings="none")


class SpeculativeFields(Fields):
    """How to draft for this request. Under the coupled rule the text does not depend on it."""

    enabled: bool | None = None
    max_draft: Annotated[int, Field(ge=0, le=MAX_DRAFT)] | None = None
    rule: Literal["coupled", "rejection", "block"] | None = None
    ngram: bool | None = None
    spans: bool | None = None  # mark in a stream which text was drafted
    rounds: bool | None = None  # list each evaluation of the target


class SamplingFields(Fields):
    """How tokens are drawn; null and missing fields have llama.cpp's defaults."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    logit_bias: dict[BiasedText, Bias] | list[tuple[int | BiasedText, Bias]] | None = None
    ignore_eos: bool | None = None
    speculative: SpeculativeFields | None = None

    def biases(self, tokenize: Callable[[str], Iterable[int]]) -> dict[int, float]:
        """What `logit_bias` adds to the score of each token; that of a text is for each of its tokens."""
        given, found = self.logit_bias or (), dict[int, float]()
        for name, bias in given.items() if isinstance(given, dict) else given:
            is_number = isinstance(name, int) or _NUMBER.fullmatch(name)
            for token in [int(name)] if is_number else tokenize(str(name)):
                found[token] = found.get(token, 0.0) + (_NEVER if bias is False else bias)
        return found

    def sampling(self, end_tokens: Iterable[int] = (), biases: Mapping[int, float] | None = None) -> Sampling:
        """The sampling parameters; `end_tokens` are those that `ignore_eos` excludes."""
        bias = dict(biases or {})
        if self.ignore_eos:
            bias |= dict.fromkeys(end_tokens, _NEVER)
        default = Sampling()
        top_p = default.top_p if self.top_p is None else self.top_p
        min_p = default.min_p if self.min_p is None else self.min_p
        top_k = default.top_k if self.top_k is None else self.top_k
        is_penalised = self.repeat_last_n != 0
        return Sampling(
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_k=top_k if top_k is not None and top_k > 0 else None,
            top_p=None if top_p == 1 else max(top_p or 0.0, _TINY_TOP_P),
            min_p=min_p or None,
            repeat_penalty=self.repeat_penalty if is_penalised and self.repeat_penalty != 1 else None,
            presence_penalty=(is_penalised and self.presence_penalty) or None,
            frequency_penalty=(is_penalised and self.frequency_penalty) or None,
            penalty_window=self._penalty_window,
            logit_bias=bias or None,
        )

    @property
    def _penalty_window(self) -> int | None:
        """OpenAI's two penalties alone cover what was generated, llama.cpp's the last tokens."""
        if self.repeat_last_n is None and self.repeat_penalty in (None, 1):
            return None
        if self.repeat_last_n == -1:
            return _ALL_TOKENS
        return self.repeat_last_n or Sampling().penalty_window

    def seed_or_random(self) -> int:
        """The seed; -1 and none mean a random one."""
        return secrets.randbits(32) if self.seed in (None, -1) else int(self.seed or 0)

    @property
    def drafting(self) -> SpeculativeFields:
        """How to draft."""
        return self.speculative or SpeculativeFields()


# Conversations.


class ContentPart(Fields):
    """A part of a message: text, or one of Anthropic's blocks; of other parts only the type counts."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)] | None = None
    id: str | None = None  # of tool_use, as the next two
    name: str | None = None
    input: dict[str, Any] | str | list[Any] | None = None  # an object, but for what a limit has cut
    tool_use_id: str | None = None  # of tool_result, as the next
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_type(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        return {"type": kind} if isinstance(kind, str) and kind not in _PARTS else given


Content = str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)]


class FunctionFields(Fields):
    """The name and the arguments of a call; the latter are JSON as text or, of some clients, an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallFields(Fields):
    """A tool call of the assistant."""

    id: str | None = None
    function: FunctionFields


class MessageFields(Fields):
    """A message of a conversation, in OpenAI's form or Anthropic's."""

    role: Role
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallFields], Field(max_length=MAX_MESSAGES)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def conversation(messages: Sequence[tuple[str, MessageFields]]) -> list[Message]:
    """The messages for the chat template; each comes with its place in the request, such as "messages.3".

    RequestError if one is of a kind that is not supported.
    """
    found: list[Message] = []
    names: dict[str, str] = {}  # of the tool of each call: some templates want it with the result
    for place, fields in messages:
        for message in _messages(fields, place):
            names.update({call.id: call.name for call in message.tool_calls})
            name = message.name or (names.get(message.tool_call_id or "") if message.role == "tool" else None)
            found.append(replace(message, name=name, place=place))
    return found


def placed(messages: Sequence[MessageFields]) -> list[tuple[str, MessageFields]]:
    """Each message of the field `messages` with its place."""
    if not messages:
        raise bad_field("messages", "must not be empty")
    return [(f"messages.{i}", message) for i, message in enumerate(messages)]


def text_of(content: Content | None, place: str) -> str:
    """The text of a message, its parts joined; RequestError if a part is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(part, f"{place}.{i}") for i, part in enumerate(content))


def _result_text(content: Content | None, place: str) -> str:
    """The text of a tool's result. Other parts are only named: agents send them again in every turn."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        _part_text(part, f"{place}.{i}") if part.type in _TEXTS else f"[{part.type} left out: not text]"
        for i, part in enumerate(content)
    )


def _part_text(part: ContentPart, place: str) -> str:
    if part.type not in _TEXTS:
        raise not_supported(f"{place}.type", "only text is supported here, no images, audio or files")
    return required(part.refusal if part.type == "refusal" else part.text, f"{place}.text")


def _messages(fields: MessageFields, place: str) -> list[Message]:
    """A message; the tool results that are blocks in it come before it, as messages of their own."""
    role = {"developer": "system", "function": "tool"}.get(fields.role, fields.role)
    content, is_assistant = fields.content, role == "assistant"
    if role == "tool":
        text = _result_text(content, f"{place}.content")
        return [Message("tool", text, name=fields.name, tool_call_id=fields.tool_call_id)]
    if fields.tool_calls and not is_assistant:
        raise bad_field(f"{place}.tool_calls", "only the assistant calls tools")
    called = [(call.id or "", call.function) for call in fields.tool_calls or ()]
    calls = [ToolCall(call_id, each.name, _written(each.arguments)) for call_id, each in called]
    text, reasoning, results = "", fields.reasoning_content or "", list[Message]()
    parts = [ContentPart(type="text", text=content)] if isinstance(content, str) else content or []
    for i, part in enumerate(parts):
        at = f"{place}.content.{i}"
        if part.type == "thinking" and is_assistant:
            # Of another server only the signature may be left.
            reasoning += text_of(part.thinking, f"{at}.thinking")
        elif is_assistant and (part.type == "redacted_thinking" or part.type not in _PARTS):
            continue  # encrypted by another server, or of a tool that it ran
        elif part.type == "tool_use" and is_assistant:
            name, call_id = required(part.name, f"{at}.name"), required(part.id, f"{at}.id")
            calls.append(ToolCall(call_id, name, _written(part.input)))
        elif part.type == "tool_result" and role == "user":
            call_id = required(part.tool_use_id, f"{at}.tool_use_id")
            text_of_result = _result_text(part.content, f"{at}.content")
            results.append(Message("tool", text_of_result, tool_call_id=call_id))
        else:
            text += _part_text(part, at)
    if results and not text:
        return results
    if role == "system":
        return [system_message(text)]
    message = Message(role, text, name=fields.name, tool_calls=tuple(calls), reasoning=reasoning or None)
    return [*results, message]


def _written(arguments: Any) -> str:
    """Arguments of a call as text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def system_message(text: str, place: str = "") -> Message:
    """A system message, without Claude Code's billing header."""
    return Message("system", _BILLING_HEADER.sub("", text), place=place)


def required(value: str | None, place: str) -> str:
    """The value; RequestError if it is missing."""
    if value is None:
        raise bad_field(place, "is missing")
    return value
