"""A conversation with what the answer may and must be, whatever the API: made into a prompt and a `Manner`.

The chat APIs differ in names only; `Question` is what they have in common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool

from llamaspec.chat.formats import AnswerFormat, CallFormat
from llamaspec.chat.message import Message
from llamaspec.chat.template import RESERVED
from llamaspec.chat.tool_grammar import answer_grammar, tool_grammar
from llamaspec.errors import PromptError
from llamaspec.protocols import Constraint
from llamaspec.sampling.grammar import WHITESPACE
from llamaspec.serve.constraints import Constraints, Shape
from llamaspec.serve.faults import RequestError, not_supported
from llamaspec.serve.fields import Fields
from llamaspec.serve.jobs import Manner
from llamaspec.serve.prompts import Prompts
from llamaspec.values import TokenArray

MAX_TOOLS = 512
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


@dataclass(frozen=True, slots=True, eq=False)
class Thinking:
    """How a model is to think before it answers."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    budget: int | None = None  # tokens; 0 = not at all, None = as long as it likes


@dataclass(frozen=True, slots=True, eq=False)
class ToolUse:
    """Tools and how they may be used."""

    tools: Sequence[Mapping[str, Any]] = ()  # in OpenAI's form
    choice: str = "auto"  # none, required, or the name of one of them with `is_named`
    is_named: bool = False
    is_parallel: bool = True
    is_strict: bool = False  # arguments that cannot be held to their schemas are an error

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the model sees."""
        return self.tools if self.is_named or self.choice != "none" else ()

    @property
    def is_forced(self) -> bool:
        """Whether some tool must be called."""
        return self.is_named or self.choice == "required"


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What a chat model is asked."""

    messages: Sequence[Message]
    place: str = "messages"  # the field of the request
    tool_use: ToolUse = field(default_factory=ToolUse)
    thinking: Thinking = field(default_factory=Thinking)
    shape: Shape | None = None


class ThinkingFields(Fields):
    """What the chat APIs take besides to steer reasoning."""

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_budget_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None

    def thinking(self, effort: str | None = None, budget: int | None = None, off: bool = False) -> Thinking:
        """The same in one place; `effort` is OpenAI's."""
        kwargs = dict(self.chat_template_kwargs or {})
        if effort is not None and effort != "none":
            kwargs.setdefault("reasoning_effort", {"minimal": "low", "xhigh": "high"}.get(effort, effort))
        enabled = self.enable_thinking if self.enable_thinking is not None else kwargs.get("enable_thinking")
        if off or effort == "none":
            enabled = False
        if enabled is not None:
            kwargs["enable_thinking"] = enabled
        if self.thinking_budget_tokens is not None:
            budget = self.thinking_budget_tokens
        budget = None if budget is None or budget < 0 else budget
        return Thinking(kwargs, 0 if enabled is False else budget)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


async def prompted(question: Question, prompts: Prompts, *, fits: bool = True) -> tuple[TokenArray, bool]:
    """The prompt of a question, and whether the answer begins with reasoning.

    Raises
    ------
    RequestError
        It names the field that cannot be obeyed.
    """
    use, kwargs = question.tool_use, question.thinking.kwargs
    if use.tools and not prompts.takes_tools:
        raise not_supported("tools", "this model's chat template takes no tools")
    if use.is_forced and not use.tools:
        raise RequestError(400, "tool_choice: there are no tools", field="tool_choice")
    if use.is_named and use.choice not in {tool["function"]["name"] for tool in use.tools}:
        raise RequestError(400, "tool_choice: names none of the tools; name one", field="tool_choice")
    if taken := RESERVED.intersection(kwargs):
        field = "chat_template_kwargs"
        message = f"{field}: the template gets {', '.join(sorted(taken))} from elsewhere; leave that out"
        raise RequestError(400, message, field=field)
    return await run_in_threadpool(
        prompts.of_messages, question.messages, use.offered, kwargs, field=question.place, fits=fits
    )


async def answerable(
    question: Question, prompts: Prompts, constraints: Constraints
) -> tuple[TokenArray, Manner]:
    """The prompt of a question, and the manner of its answer.

    Raises
    ------
    RequestError
        It names the field that cannot be obeyed.
    """
    prompt, is_thinking = await prompted(question, prompts)
    use = question.tool_use
    manner = Manner(prompts.answer_format, use.offered, is_thinking, question.thinking.budget)
    if question.shape is not None:
        if use.offered:
            raise not_supported(question.shape.field, "cannot be combined with tools")
        return prompt, await _shaped(manner, question.shape, prompts, constraints)
    return prompt, await _with_tools(manner, use, prompts, constraints) if use.offered else manner


async def _shaped(manner: Manner, shape: Shape, prompts: Prompts, constraints: Constraints) -> Manner:
    """An answer of a shape, behind whatever the model thinks."""
    answer_format, is_harmony = manner.answer_format, _is_harmony(manner.answer_format)
    alone = await constraints.compiled(shape)
    if answer_format.reasoning is None:
        return replace(manner, constraint=alone)
    if shape.kind == "grammar":
        if is_harmony:
            raise not_supported(shape.field, "this model's answers have channels; use a JSON schema")
        return replace(manner, constraint=alone, constraint_after_cut=alone, budget=0)
    if manner.budget == 0 and not is_harmony:
        return replace(manner, constraint=alone, constraint_after_cut=alone)
    schema = json.loads(shape.text)
    schema.setdefault("x-guidance", {"whitespace_pattern": WHITESPACE})
    text = answer_grammar(answer_format, schema, thinking=manner.is_thinking, controls=prompts.controls)
    behind = await constraints.compiled(Shape("grammar", text, shape.field))
    return replace(manner, constraint=behind, constraint_after_cut=alone)


async def _with_tools(manner: Manner, use: ToolUse, prompts: Prompts, constraints: Constraints) -> Manner:
    """Calls of tools that are held to their schemas, where the model's format is known."""
    is_harmony = _is_harmony(manner.answer_format)
    silent = replace(manner.answer_format, reasoning=None)

    async def constraint(answer_format: AnswerFormat, is_thinking: bool) -> Constraint | None:
        choice = {"name": use.choice} if use.is_named else use.choice
        try:
            text = tool_grammar(
                answer_format,
                [_bare(tool, is_strict=use.is_strict) for tool in use.tools],
                choice,
                use.is_parallel,
                thinking=is_thinking,
                controls=prompts.controls,
            )
            if text is not None:
                return await constraints.compiled(Shape("grammar", text, "tools"))
        except (PromptError, RequestError) as error:
            if use.is_forced or use.is_strict:
                raise error if isinstance(error, RequestError) else _bad_tools(error) from None
            return None  # the model calls as it was trained to
        if use.is_forced:
            raise not_supported("tool_choice", "this model's format of calls cannot be forced")
        return None

    if is_harmony:
        # A cut would lead to the answer, and so past the call.
        return replace(manner, constraint=await constraint(manner.answer_format, False), budget=None)
    after = await constraint(silent, False)
    first = after if manner.budget == 0 else await constraint(manner.answer_format, manner.is_thinking)
    return replace(manner, constraint=first, constraint_after_cut=after)


def _bad_tools(error: PromptError) -> RequestError:
    return RequestError(400, f"tools: {error}", field="tools")


def _is_harmony(answer_format: AnswerFormat) -> bool:
    return answer_format.calls is CallFormat.HARMONY


def _bare(tool: Mapping[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """A tool without what is only for reading: grammars have a limit, and agents' descriptions are long.

    Unless it is strict, what llguidance does not know of a schema is left out, too.
    """
    function = tool["function"]
    schema = _without_prose(function["parameters"])
    schema.setdefault("x-guidance", {"whitespace_pattern": WHITESPACE, "lenient": not is_strict})
    return {"function": {"name": function["name"], "parameters": schema}}


def _without_prose(schema: Any, *, is_names: bool = False) -> Any:
    if isinstance(schema, list):
        return [_without_prose(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if key in ("enum", "const") and not is_names
        else _without_prose(value, is_names=key in ("properties", "$defs", "definitions") and not is_names)
        for key, value in schema.items()
        if is_names or key not in ("description", "title", "examples", "default", "$schema")
    }
