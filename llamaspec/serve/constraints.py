"""Constraints on answers: response formats, and calls that fit the schemas of their tools.

tests/serve/test_shapes.py, tests/serve/test_schemas.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from dataclasses import field as default
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool

from llamaspec.chat.families import HARMONY, AnswerFormat
from llamaspec.chat.tool_grammar import answer_grammar, tool_grammar
from llamaspec.errors import ConstraintError
from llamaspec.pair import Pair
from llamaspec.protocols import Constraint
from llamaspec.sampling.constraint import WHITESPACE
from llamaspec.serve.bodies import Fields
from llamaspec.serve.errors import bad_field, not_supported
from llamaspec.serve.messages import ToolUse, subschemas, without_prose

MAX_COMPILED = 64  # constraints in the cache
# Write arguments as templates do in the next turn (Jinja's tojson), so that the KV cache holds them.
_AS_RENDERED: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A schema or grammar that an answer must match."""

    kind: Literal["json_schema", "grammar"]
    text: str
    field: str  # of the request, for errors
    place: str  # of the schema or grammar in the request, such as response_format.schema

    @classmethod
    def of_schema(cls, schema: Schema, field: str, place: str) -> ResponseFormat:
        """Return the format of a JSON schema."""
        return cls("json_schema", json.dumps(without_prose(schema)), field, place)


class FormatFields(Fields):
    """The response format, given directly or, in some APIs, in `format`."""

    type: str | None = None
    json_schema: FormatFields | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    format: FormatFields | None = None

    def wanted(self, field: str) -> ResponseFormat | None:
        """Return the format, None for text; RequestError if the type is unknown or the schema is missing."""
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
    """Return the format given in `format` of a field."""
    return None if fields is None or fields.format is None else fields.format.wanted(f"{field}.format")


@dataclass(frozen=True, slots=True, eq=False)
class GenerationParameters:
    """The parts of an answer and its constraints. Default: any text."""

    answer_format: AnswerFormat = default(default_factory=AnswerFormat)
    tools: Sequence[Mapping[str, Any]] = ()  # tools that may be called
    starts_in_reasoning: bool = False
    reasoning_budget: int | None = None  # tokens
    constraint: Constraint | None = None
    constraint_after_cut: Constraint | None = None  # replaces it once the reasoning is ended by its budget
    not_held: Sequence[str] = ()  # tools whose schemas cannot be enforced, for the log


class Constraints:
    """Compiles the constraints of one pair, with a cache of the most recent ones.

    `marks` are the tokens that the vocabulary has for the marks of calls and reasoning.
    """

    def __init__(self, pair: Pair, marks: Mapping[str, int]) -> None:
        self._pair, self._marks = pair, marks
        self._compile = lru_cache(MAX_COMPILED)(
            lambda kind, text: (pair.json_schema if kind == "json_schema" else pair.grammar)(text)
        )
        self._of_calls = lru_cache(MAX_COMPILED)(self._compile_calls)

    async def compile(self, wanted: ResponseFormat) -> Constraint:
        """Compile a response format in a thread; RequestError names the faulty part of a schema."""
        try:
            return await run_in_threadpool(self._compile, wanted.kind, wanted.text)
        except ConstraintError as error:
            place = wanted.place
            if wanted.kind == "json_schema":
                path = await run_in_threadpool(self._fault, json.loads(wanted.text))
                place = _path(place, path)
            raise bad_field(place, str(error)) from error

    async def with_format(
        self, parameters: GenerationParameters, wanted: ResponseFormat
    ) -> GenerationParameters:
        """Constrain the text that follows the reasoning."""
        answer_format = parameters.answer_format
        has_channels = answer_format.calls is HARMONY
        alone = await self.compile(wanted)
        if answer_format.reasoning is None:
            return replace(parameters, constraint=alone)
        if wanted.kind == "grammar":
            if has_channels:
                raise not_supported(wanted.field, "this model's answers have channels; use a JSON schema")
            return replace(parameters, constraint=alone, constraint_after_cut=alone, reasoning_budget=0)
        if parameters.reasoning_budget == 0 and not has_channels:
            return replace(parameters, constraint=alone, constraint_after_cut=alone)
        schema = json.loads(wanted.text)
        schema.setdefault("x-guidance", {"whitespace_pattern": WHITESPACE})
        thinking = parameters.starts_in_reasoning
        grammar = answer_grammar(answer_format, schema, self._marks, thinking=thinking)
        constraint = await self.compile(ResponseFormat("grammar", grammar, wanted.field, wanted.place))
        return replace(parameters, constraint=constraint, constraint_after_cut=alone)

    async def with_tools(self, parameters: GenerationParameters, use: ToolUse) -> GenerationParameters:
        """Constrain calls to their schemas, if the grammar of the model's calls is known."""
        answer_format = parameters.answer_format
        if answer_format.calls is HARMONY:
            # Cutting the reasoning would lead to the final channel, past the call.
            constraint, not_held = await self._calls(answer_format, False, use)
            return replace(parameters, constraint=constraint, not_held=not_held, reasoning_budget=None)
        after_cut, not_held = await self._calls(replace(answer_format, reasoning=None), False, use)
        first = after_cut
        if parameters.reasoning_budget != 0:
            first, not_held = await self._calls(answer_format, parameters.starts_in_reasoning, use)
        return replace(parameters, constraint=first, constraint_after_cut=after_cut, not_held=not_held)

    async def _calls(
        self, answer_format: AnswerFormat, thinking: bool, use: ToolUse
    ) -> tuple[Constraint | None, Sequence[str]]:
        """Return the constraint of an answer with calls, and the tools whose schemas it cannot enforce."""
        named = [tool["function"] for tool in use.tools]
        named = [each for each in named if not use.is_named or each["name"] == use.choice]
        tools: list[str] = []
        for each in named:
            schema = without_prose(each["parameters"])
            # Unless it is strict, llguidance ignores keywords that it does not know.
            spaces = {**_spaces(answer_format), "lenient": each["name"] not in use.strict}
            schema.setdefault("x-guidance", spaces)
            tools.append(json.dumps({"name": each["name"], "parameters": schema}))
        strict = frozenset(use.strict)
        asked = (answer_format, thinking, use.is_forced, use.is_parallel, tuple(tools), strict)
        constraint, not_held = await run_in_threadpool(self._of_calls, *asked)
        if constraint is None and use.is_forced:
            raise not_supported("tool_choice", "this model's format of calls cannot be forced")
        return constraint, not_held

    def _compile_calls(
        self,
        answer_format: AnswerFormat,
        thinking: bool,
        is_forced: bool,
        is_parallel: bool,
        tools: tuple[str, ...],
        strict: Set[str],
    ) -> tuple[Constraint | None, Sequence[str]]:
        """As `_calls`; each tool as JSON. Parameters that do not compile become any object, unless strict."""
        several = [json.loads(tool) for tool in tools]

        def compiled(several: Sequence[Schema]) -> Constraint | None:
            grammar = tool_grammar(
                answer_format,
                several,
                self._marks,
                is_forced=is_forced,
                is_parallel=is_parallel,
                thinking=thinking,
            )
            return None if grammar is None else self._pair.grammar(grammar)

        names = [tool["name"] for tool in several]
        any_object = {"x-guidance": {**_spaces(answer_format), "lenient": True}}
        free: dict[int, str] = {}  # tools without a schema, with the reason for the log
        while True:
            each = [
                {**tool, "parameters": any_object} if i in free else tool for i, tool in enumerate(several)
            ]
            try:
                return compiled(each), [f"{names[i]} ({why})" for i, why in free.items()]
            except ConstraintError as error:
                reasons = {} if free else {i: self._wrong(tool, compiled) for i, tool in enumerate(several)}
                wrong = {i: why for i, why in reasons.items() if why is not None}
                if not wrong:  # each compiles, but all together are too large
                    held = [i for i in range(len(tools)) if i not in free and names[i] not in strict]
                    held.sort(key=lambda i: -len(tools[i]))
                    wrong = dict.fromkeys(held[: max(1, len(held) // 8)], str(error))
                refused = [f"{names[i]}: {why}" for i, why in wrong.items() if names[i] in strict]
                if refused or not wrong:
                    raise bad_field("tools", refused[0] if refused else str(error)) from error
                free |= wrong

    def _wrong(self, tool: Schema, compiled: Callable[[Sequence[Schema]], object]) -> str | None:
        """Return why a tool cannot be compiled on its own; None if it can."""
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

        wrong = error_of(schema)

        def fails(parts: Sequence[Schema]) -> bool:
            """Whether one of the parts causes the error; others may refer to missing definitions."""
            properties = {str(i): part for i, part in enumerate(parts)}
            return error_of({**shared, "type": "object", "properties": properties}) == wrong

        def path(part: Schema) -> str:
            found = list(subschemas(part))
            while len(found) > 1:
                half = found[: len(found) // 2]
                found = half if fails([inner for _, inner in half]) else found[len(half) :]
            if not (found and fails([found[0][1]])):
                return ""
            name, inner = found[0]
            return _path(name, path(inner))

        return "" if wrong is None else path(schema)


def _path(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _spaces(answer_format: AnswerFormat) -> Mapping[str, Any]:
    """Return where a model may write spaces in the arguments of its calls."""
    if answer_format.calls is HARMONY:  # trained to write JSON without spaces
        return {"whitespace_pattern": WHITESPACE}
    return _AS_RENDERED
