"""Constraints on answers: response formats, and the schemas of tools.

tests/serve/test_shapes.py, tests/serve/test_schemas.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as default
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from starlette.concurrency import run_in_threadpool

from llamaspec.chat.families import HARMONY
from llamaspec.chat.notation import AnswerFormat
from llamaspec.chat.tool_grammar import answer_grammar, tool_grammar
from llamaspec.errors import ConstraintError
from llamaspec.pair import Pair
from llamaspec.protocols import Constraint
from llamaspec.sampling.constraint import MAX_TEXT, WHITESPACE
from llamaspec.sampling.schemas import subschemas, without_prose
from llamaspec.serve.bodies import Fields, JsonObject
from llamaspec.serve.custom_tools import input_schema
from llamaspec.serve.http_errors import bad_field, not_supported
from llamaspec.serve.message_fields import ToolUse
from llamaspec.values import TokenArray

MAX_COMPILED = 64  # constraints in the cache
# Spaces as chat templates write arguments in the next turn (Jinja's tojson), so that cached tokens match.
_AS_RENDERED: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A JSON schema or a grammar that an answer must match."""

    kind: Literal["json_schema", "grammar"]
    text: str
    field: str  # of the request, for errors
    place: str  # path of the schema or grammar in the request, such as response_format.schema

    @classmethod
    def of_schema(cls, schema: Schema, field: str, place: str) -> ResponseFormat:
        """Return the format of a JSON schema."""
        return cls("json_schema", json.dumps(without_prose(schema)), field, place)


class FormatFields(Fields):
    """A response format; in some APIs it is in `format`."""

    type: str | None = None
    json_schema: FormatFields | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    format: FormatFields | None = None

    def wanted(self, field: str) -> ResponseFormat | None:
        """Return the format, or None for text; RequestError if its type is unknown or its schema missing."""
        if self.type == "text":
            return None
        if self.type not in ("json_object", "json_schema"):
            raise not_supported(f"{field}.type", "must be text, json_object or json_schema")
        schema = (self.json_schema or self).schema_
        if schema is None and self.type == "json_schema":
            raise bad_field(f"{field}.json_schema", "is missing")
        place = f"{field}.schema" if self.json_schema is None else f"{field}.json_schema.schema"
        return ResponseFormat.of_schema({"type": "object"} if schema is None else schema, field, place)


def inner_format(fields: FormatFields | None, field: str) -> ResponseFormat | None:
    """Return the response format in `format` of a field."""
    return None if fields is None or fields.format is None else fields.format.wanted(f"{field}.format")


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt, and the format and the constraints of its answer; by default, any text may follow."""

    tokens: TokenArray  # [n] int32
    answer_format: AnswerFormat = default(default_factory=AnswerFormat)
    tools: Sequence[Mapping[str, Any]] = ()  # tools that may be called
    starts_in_reasoning: bool = False
    reasoning_budget: int | None = None  # tokens
    constraint: Constraint | None = None
    constraint_after_cut: Constraint | None = None  # replaces it if the budget cuts the reasoning off
    pictures: tuple[object, ...] = ()  # kept until the sequence has ended
    not_enforced: Sequence[str] = ()  # tools whose schemas cannot be enforced, each with why, for the log


class _Calls(NamedTuple):
    """The constraint of an answer with calls, and the tools whose schemas it cannot enforce."""

    constraint: Constraint | None  # None: the grammar of the model's calls is not known
    not_enforced: Sequence[str]


class Constraints:
    """Compiles the constraints of answers of one pair, and keeps the most recent ones.

    `marks`: text -> token, for the marks of calls and reasoning that the vocabulary has as tokens.
    """

    def __init__(self, pair: Pair, marks: Mapping[str, int]) -> None:
        self._pair, self._marks = pair, marks
        self._compile = lru_cache(MAX_COMPILED)(
            lambda kind, text: (pair.json_schema if kind == "json_schema" else pair.grammar)(text)
        )
        self._of_calls = lru_cache(MAX_COMPILED)(self._compile_calls)

    async def compile(self, wanted: ResponseFormat) -> Constraint:
        """Compile a response format in a thread. A RequestError names the faulty part of a schema."""
        try:
            return await run_in_threadpool(self._compile, wanted.kind, wanted.text)
        except ConstraintError as error:
            path = ""
            if wanted.kind == "json_schema" and len(wanted.text) <= MAX_TEXT:  # else it is too long
                path = await run_in_threadpool(self._fault, json.loads(wanted.text))
            raise bad_field(_path(wanted.place, path), str(error)) from error

    async def with_format(self, prompt: Prompt, wanted: ResponseFormat) -> Prompt:
        """Return the prompt with its answer constrained to a format, after any reasoning."""
        answer_format = prompt.answer_format
        has_channels = answer_format.calls is HARMONY
        alone = await self.compile(wanted)
        if answer_format.reasoning is None:
            return replace(prompt, constraint=alone)
        if wanted.kind == "grammar":
            if has_channels:
                raise not_supported(wanted.field, "this model's answers have channels; use a JSON schema")
            return replace(prompt, constraint=alone, constraint_after_cut=alone, reasoning_budget=0)
        if prompt.reasoning_budget == 0 and not has_channels:
            return replace(prompt, constraint=alone, constraint_after_cut=alone)
        schema = json.loads(wanted.text)
        schema.setdefault("x-guidance", {"whitespace_pattern": WHITESPACE})
        thinking = prompt.starts_in_reasoning
        grammar = answer_grammar(answer_format, schema, self._marks, thinking=thinking)
        constraint = await self.compile(ResponseFormat("grammar", grammar, wanted.field, wanted.place))
        return replace(prompt, constraint=constraint, constraint_after_cut=alone)

    async def with_tools(self, prompt: Prompt, use: ToolUse) -> Prompt:
        """Return the prompt with calls constrained to their schemas, if the grammar of the calls is known."""
        answer_format = prompt.answer_format
        functions = [tool["function"] for tool in use.tools]
        functions = [each for each in functions if not use.is_named or each["name"] == use.choice]
        tools = await run_in_threadpool(_tool_texts, functions, use, answer_format)

        async def compiled(answer_format: AnswerFormat, thinking: bool) -> _Calls:
            options = answer_format, thinking, use.is_forced, use.is_parallel, tools
            found = await run_in_threadpool(self._of_calls, *options)
            if found.constraint is None and use.is_forced:
                raise not_supported("tool_choice", "calls cannot be forced in this model's format")
            return found

        if answer_format.calls is HARMONY:
            # If the budget cut the reasoning off, the final channel would follow, which has no calls.
            calls = await compiled(answer_format, False)
            return replace(prompt, **calls._asdict(), reasoning_budget=None)
        calls = after_cut = await compiled(replace(answer_format, reasoning=None), False)
        if prompt.reasoning_budget != 0:
            calls = await compiled(answer_format, prompt.starts_in_reasoning)
        return replace(prompt, **calls._asdict(), constraint_after_cut=after_cut.constraint)

    def _compile_calls(
        self,
        answer_format: AnswerFormat,
        thinking: bool,
        is_forced: bool,
        is_parallel: bool,
        tools: tuple[str, ...],
    ) -> _Calls:
        """Compile tools, given as JSON; the arguments of one that does not compile become any object."""
        several = [json.loads(tool) for tool in tools]
        noted = [f"{tool['name']} ({tool['why']})" for tool in several if tool["why"]]
        free: dict[int, str] = {}  # tool -> why its arguments may be any object

        def compiled(several: Sequence[Schema]) -> Constraint | None:
            options = {"is_forced": is_forced, "is_parallel": is_parallel, "thinking": thinking}
            grammar = tool_grammar(answer_format, several, self._marks, **options)
            return None if grammar is None else self._pair.grammar(grammar)

        while True:
            for i in free:
                several[i]["parameters"] = several[i]["free"]
            try:
                calls = compiled(several)
                return _Calls(calls, noted + [f"{several[i]['name']} ({why})" for i, why in free.items()])
            except ConstraintError as error:
                wrong: dict[int, str] = {}
                if not free:
                    reasons = enumerate(self._wrong(tool, compiled) for tool in several)
                    wrong = {i: why for i, why in reasons if why is not None}
                if not wrong:  # each compiles, but together they are too large
                    rest = [i for i, tool in enumerate(several) if i not in free and not tool["strict"]]
                    rest.sort(key=lambda i: -len(tools[i]))
                    wrong = dict.fromkeys(rest[: max(1, len(rest) // 8)], str(error))
                refused = [f"{several[i]['name']}: {why}" for i, why in wrong.items() if several[i]["strict"]]
                if refused or not wrong:
                    raise bad_field("tools", refused[0] if refused else str(error)) from error
                free |= wrong

    def _wrong(self, tool: Schema, compiled: Callable[[Sequence[Schema]], object]) -> str | None:
        """Return why a tool does not compile on its own; None if it does."""
        try:
            compiled([tool])
        except ConstraintError as error:
            return f"{_path('parameters', self._fault(tool['parameters']))}: {error}"
        return None

    def _fault(self, schema: Schema) -> str:
        """Return the path of the innermost part of a schema that does not compile; "" for the whole."""
        shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}

        def error_of(schema: Schema) -> str | None:
            try:
                self._pair.json_schema(schema)
            except ConstraintError as error:
                return str(error)
            return None

        def fails(parts: Sequence[Schema]) -> bool:
            """Whether one of the parts causes the error; other errors may come from missing definitions."""
            properties = {str(i): part for i, part in enumerate(parts)}
            return error_of({**shared, "type": "object", "properties": properties}) == wrong

        def path(part: Schema) -> str:
            found = list(subschemas(part))
            while len(found) > 1:  # in halves, because a client can send thousands
                half = found[: len(found) // 2]
                found = half if fails([inner for _, inner in half]) else found[len(half) :]
            if not (found and fails([found[0][1]])):
                return ""
            name, inner = found[0]
            return _path(name, path(inner))

        wrong = error_of(schema)
        return "" if wrong is None else path(schema)


def _path(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _spaces(answer_format: AnswerFormat) -> Mapping[str, Any]:
    """Return the spaces that a model may write in the arguments of its calls."""
    if answer_format.calls is HARMONY:  # trained to write JSON without spaces
        return {"whitespace_pattern": WHITESPACE}
    return _AS_RENDERED


def _tool_texts(functions: Sequence[Schema], use: ToolUse, answer_format: AnswerFormat) -> tuple[str, ...]:
    """Return what is compiled of each tool, as JSON; `free` replaces `parameters` that do not compile."""
    texts = []
    for function in functions:
        name, schema, free, why = function["name"], function["parameters"], {}, ""
        if (form := use.customs.get(name)) is not None:
            free = schema
            try:
                schema = input_schema(form)
            except ConstraintError as error:
                why = str(error)
        # If lenient, llguidance ignores keywords that it does not know.
        lenient = {**_spaces(answer_format), "lenient": True}
        schema, free = without_prose(schema), {**free, "x-guidance": lenient}
        schema.setdefault("x-guidance", {**lenient, "lenient": name not in use.strict})
        tool = {"name": name, "parameters": schema, "free": free, "why": why, "strict": name in use.strict}
        texts.append(json.dumps(tool))
    return tuple(texts)
