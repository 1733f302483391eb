"""Grammars that hold a model to the schemas of its tools, in the family's own format of calls.

The text is Lark in llguidance's dialect: `%json` for arguments, `<[7]>` for the token 7. `required` forces a
call; `auto` lets the model talk and binds it once a call begins. tests/chat/test_tool_grammar.py asks
llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llamaspec.chat.call_grammar import AROUND, NO_PARAMETERS, Marks, call_rules, escaped
from llamaspec.chat.formats import HARMONY_MARKS, AnswerFormat, CallFormat
from llamaspec.errors import PromptError

Json = Any  # what json.loads makes
ToolChoice = str | Mapping[str, Json]  # auto, none, required, or OpenAI's naming of one function

_ANYTHING = r"/(?s:.*)/"


def tool_grammar(
    answer_format: AnswerFormat,
    tools: Sequence[Mapping[str, Json]],
    tool_choice: ToolChoice = "auto",
    parallel: bool = True,
    *,
    thinking: bool = False,
    controls: Mapping[str, int] | None = None,
) -> str | None:
    """The grammar of an answer that calls tools rightly.

    Parameters
    ----------
    answer_format : AnswerFormat
    tools : sequence of dict
        In OpenAI's form.
    tool_choice : str or dict
        "auto", "required", "none", the name of a tool, or {"type": "function", "function": {"name": …}}.
    parallel : bool
        Several calls are allowed, where the family writes several.
    thinking : bool
        The prompt ends with the mark that opens reasoning.
    controls : dict of str to int
        The vocabulary's control tokens (`vocabulary.controls`): marks among them are tokens, others text.

    Returns
    -------
    str or None
        None where nothing is to be forced, or the format is not known.

    Raises
    ------
    PromptError
        The tool that was named is not among the tools.

    Examples
    --------
    >>> now = [{"type": "function", "function": {"name": "now"}}]
    >>> print(tool_grammar(AnswerFormat(CallFormat.LLAMA3), now, "required"))
    start: call
    call: call_0
    call_0: "{\\"name\\": \\"now\\", \\"parameters\\": " arguments_0 "}"
    arguments_0: %json {"type": "object", "properties": {}, "additionalProperties": false}
    """
    chosen = _chosen(tools, tool_choice)
    if not chosen or answer_format.calls is None:
        return None
    grammar = _Grammar(answer_format, dict(controls or {}), thinking)
    if answer_format.calls is CallFormat.HARMONY and not all(
        mark in grammar.controls for mark in HARMONY_MARKS
    ):
        return None
    return grammar.write(chosen, is_forced=tool_choice != "auto", is_parallel=parallel)


def answer_grammar(
    answer_format: AnswerFormat,
    schema: Mapping[str, Json],
    *,
    thinking: bool = False,
    controls: Mapping[str, int] | None = None,
) -> str:
    """The grammar of an answer that is JSON, behind what the model thinks.

    Parameters
    ----------
    answer_format : AnswerFormat
    schema : dict
        Of the JSON.
    thinking, controls
        As `tool_grammar` takes them.

    Examples
    --------
    >>> print(answer_grammar(AnswerFormat(), {"type": "integer"}))
    start: answer
    answer: %json {"type": "integer"}
    """
    grammar = _Grammar(answer_format, dict(controls or {}), thinking)
    return grammar.write_answer(schema)


class _Grammar:
    """Rules, and how marks are written in them."""

    def __init__(self, answer_format: AnswerFormat, controls: Mapping[str, int], is_thinking: bool) -> None:
        self.controls = controls
        self._mark = Marks(controls)
        self._format = answer_format
        self._is_thinking = is_thinking
        self._rules: list[str] = []

    def write(self, tools: Sequence[Mapping[str, Json]], *, is_forced: bool, is_parallel: bool) -> str:
        start = (self._harmony if self._format.calls is CallFormat.HARMONY else self._usual)(
            is_forced, is_parallel
        )
        self._rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        for i, tool in enumerate(tools):
            function = tool.get("function", tool)
            schema = function.get("parameters") or NO_PARAMETERS
            schema = schema if "type" in schema else {"type": "object", **schema}
            assert self._format.calls is not None
            self._rules += call_rules(self._format.calls, i, str(function["name"]), schema, self._mark)
        return "\n".join([f"start: {start}", *self._rules])

    def write_answer(self, schema: Mapping[str, Json]) -> str:
        mark = self._mark
        start = f"{self._think()}answer"
        if self._format.calls is CallFormat.HARMONY:
            self._rules = [
                f"TEXT: {_ANYTHING}",
                f'again: {mark("<|end|>")} {mark("<|start|>")} "assistant"',
                f'analysis: {mark("<|channel|>")} "analysis" {mark("<|message|>")} TEXT again',
            ]
            start = f'analysis? {mark("<|channel|>")} "final" {mark("<|message|>")} answer'
        return "\n".join([f"start: {start}", *self._rules, f"answer: %json {json.dumps(schema)}"])

    def _usual(self, is_forced: bool, is_parallel: bool) -> str:
        """What an answer consists of, but in harmony."""
        around = AROUND[self._format.calls or CallFormat.LLAMA3]
        many = f" ({around.between} call)*" if is_parallel and around.between is not None else ""
        is_parallel = is_parallel and around.again is not None
        calls = " ".join(filter(None, [f"call{many}", self._mark.all(around.closing)]))
        think = self._think()
        if is_forced:
            one = " ".join(filter(None, [self._mark.all(around.opening), calls]))
            return f"{think}{one} ({around.again} {one})*" if is_parallel else f"{think}{one}"
        if not around.opening:  # JSON as the whole answer
            self._rules.append(r"TEXT: /[^{\s](?s:.*)/")
            return f"{think}(TEXT | {calls})?"
        begin, tail = self._up_to(around.opening[0], "begin"), self._without(around.opening[0])
        one = " ".join(filter(None, [begin, self._mark.all(around.opening[1:]), calls]))
        return f"{think}({one})* {tail}" if is_parallel else f"{think}({tail} | {one})"

    def _harmony(self, is_forced: bool, _is_parallel: bool) -> str:
        """Messages in channels; the prompt has begun the first."""
        mark = self._mark
        self._rules += [
            f"TEXT: {_ANYTHING}",
            f'again: {mark("<|end|>")} {mark("<|start|>")} "assistant"',
            f'analysis: {mark("<|channel|>")} "analysis" {mark("<|message|>")} TEXT again',
            f'preamble: {mark("<|channel|>")} "commentary" {mark("<|message|>")} TEXT again',
            f'final: {mark("<|channel|>")} "final" {mark("<|message|>")} TEXT',
        ]
        return "analysis? preamble? call" if is_forced else "analysis? (final | preamble? call)"

    def _think(self) -> str:
        """Reasoning before the answer."""
        if self._format.reasoning is None:
            return ""
        self._rules.append(r"SPACE: /\s+/")
        thought = f"{self._up_to(self._format.reasoning.closing, 'thought')} SPACE?"
        if self._is_thinking:
            return f"{thought} "
        return f"({self._mark(self._format.reasoning.opening.strip())} {thought})? "

    def _up_to(self, mark: str, name: str) -> str:
        """Any text up to a mark, and the mark."""
        if mark in self.controls:
            self._rules.append(f"{name.upper()}: {_ANYTHING}")
            return f"{name.upper()} {self._mark(mark)}"
        self._rules.append(f"{name}[lazy]: /(?s:.*){escaped(mark)}/")
        return name

    def _without(self, mark: str) -> str:
        """Any text without a mark."""
        without = "" if mark in self.controls else f" & ~/(?s:.*){escaped(mark)}(?s:.*)/"
        self._rules.append(f"TAIL: {_ANYTHING}{without}")
        return "TAIL"


def _chosen(tools: Sequence[Mapping[str, Json]], choice: ToolChoice) -> Sequence[Mapping[str, Json]]:
    """The tools that may be called."""
    if choice == "none":
        return ()
    if choice in ("auto", "required"):
        return tools
    name = choice if isinstance(choice, str) else choice.get("function", choice).get("name")
    chosen = [tool for tool in tools if tool.get("function", tool).get("name") == name]
    if not chosen:
        raise PromptError(f"tool_choice names {name}, which is not among the tools; name one of them")
    return chosen
