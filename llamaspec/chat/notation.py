"""How a model writes reasoning and tool calls, as data.

`chat/families.py` has the notations of known families, and `chat/probe.py` derives others from templates.
`chat/parse.py` parses answers by them, and `chat/tool_grammar.py` makes grammars from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Parts of `CallFormat.before_call`.
NAME = "{name}"
QUOTED_NAME = '"{name}"'  # in JSON
INDEX = "{index}"  # the number of the call, or an id
FINAL = "<|channel|>final<|message|>"  # begins an answer in channels


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks around a model's reasoning."""

    opening: str
    closing: str
    after_closing: str = ""  # before the answer

    @property
    def cut(self) -> str:
        """The text that ends the reasoning once its budget is used up."""
        return f"\n{self.closing}{self.after_closing}"


@dataclass(frozen=True, slots=True)
class Pairs:
    """How arguments are written one by one, each as a key and a value.

    The value is text as it is, or JSON. If `is_keywords`, the arguments are those of a call in Python.
    """

    before_key: str
    before_value: str  # ends the key
    after_value: str
    ends: tuple[str, ...] = ()  # marks after the last pair
    before_json: str = ""  # before a value that is not text; default: as before text
    between: str = ""
    is_keywords: bool = False

    @property
    def closing(self) -> str:
        """The mark after a value."""
        return self.after_value.strip()

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Ends of a value. Its closing mark is an end before the next mark, or on a line of its own."""
        before, after = self._spaces
        spaces = [(a, b) for a in dict.fromkeys((before, "")) for b in dict.fromkeys((after, "\n", ""))]
        marks = (self.before_key.strip(), *self.ends)
        whole = (self.after_value,) if before and after else ()
        return (*whole, *(f"{a}{self.closing}{b}{mark}" for a, b in spaces for mark in marks))

    @property
    def last_value_ends(self) -> tuple[str, ...]:
        """Ends of a value where the answer ends, too."""
        return self._spaces[0] + self.closing, self.closing

    @property
    def _spaces(self) -> tuple[str, str]:
        before, _, after = self.after_value.partition(self.closing)
        return before, after


@dataclass(frozen=True, slots=True, eq=False)
class CallFormat:
    """How a family of models writes tool calls.

    A grammar has `opening`, `before_call`, the arguments, `after_call` and `closing`. The parser is less
    strict about spaces: it looks for one of `starts`, `header`, the arguments, and any of `endings`.
    """

    marks: tuple[str, ...]  # control tokens in most vocabularies
    before_call: tuple[str, ...]
    template_marks: tuple[str, ...] = ()  # regular expressions; a template of the family matches all of them
    after_call: str = ""
    opening: tuple[str, ...] = ()  # marks before calls
    closing: tuple[str, ...] = ()  # marks after calls
    between_calls: str | None = None  # inside one pair of marks; None = only one call
    between_pairs: str | None = None  # of marks; None = only one pair
    arguments: Literal["json", "pairs", "gemma", "channels"] = "json"
    pairs: Pairs | None = None  # how "pairs" are written
    starts: tuple[str, ...] = ()  # marks; default: the first of `opening`
    header: str = ""  # regular expression with the group `name`, and perhaps the group `id`
    endings: tuple[str, ...] = ()  # may follow the arguments
    separators: tuple[str, ...] = ()  # endings after which another header may follow
    bare: str = ""  # how an answer begins that is a call without marks
    known_only: bool = False  # a call of an unknown tool is content
    may_lack_marks: bool = False  # some models write only the JSON, perhaps in a fence


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The parts of an answer besides its content; None if a family has no such part."""

    calls: CallFormat | None = None
    reasoning: Reasoning | None = None

    def spelled(self, controls: Mapping[str, int]) -> dict[int, bytes]:
        """Return the control tokens that the parser must see: the argument `spelled` of `Pair.stream`."""
        marks = self.calls.marks if self.calls is not None else ()
        if self.reasoning is not None:
            marks = (*marks, self.reasoning.opening.strip(), self.reasoning.closing)
        # A mark may be a control token and a word, such as <|channel>thought.
        known = [text for text in controls if len(text) > 1 and any(text in mark for mark in marks)]
        return {controls[text]: text.encode() for text in known}

    def beginning(self, text: str, reasoning: str, prompt: bytes) -> list[tuple[str, bool]]:
        """Return the text of an answer to continue, in parts, each with whether it is a mark."""
        marks, is_thinking = self.reasoning, self.begins_thinking(prompt)
        if marks is None or prompt.rstrip().endswith(marks.closing.encode()):  # no reasoning follows
            return [(text, False)]
        parts: list[tuple[str, bool]] = []
        if self.calls is not None and self.calls.arguments == "channels":
            thought = [(marks.opening, True), (reasoning, False), (marks.cut, True)]
            parts = thought if reasoning else [(FINAL, True)]
            parts = parts if text else []  # reasoning alone is not continued
        elif reasoning or is_thinking:
            parts = [("" if is_thinking else marks.opening, True), (reasoning, False)]
            parts += [(marks.cut if text else "", True)]
        return [*parts, (text, False)]

    def begins_thinking(self, prompt: bytes) -> bool:
        """Whether a rendered conversation ends with the mark that opens reasoning."""
        reasoning = self.reasoning
        return reasoning is not None and prompt.rstrip().endswith(reasoning.opening.strip().encode())
