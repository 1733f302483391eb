"""Derives the notation of tool calls from a chat template, so that a new family needs no release.

The template renders calls with names and arguments that are easy to find again; the text around them is the
notation. It counts only if the parser then reads other rendered calls back as they were.
tests/chat/test_parse.py has templates of many families.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from llamaspec.chat.messages import Json, Message, ToolCall, message_of
from llamaspec.chat.notation import INDEX, NAME, AnswerFormat, CallFormat, Pairs
from llamaspec.chat.parse import AnswerParser
from llamaspec.chat.sandbox import PROCESS, RenderError, RenderTimeError

Call = tuple[str, Mapping[str, Json]]  # name and arguments
_CONTENT, _FIRST, _SECOND, _TEXT, _NUMBER = (
    "Probe content.",
    "probe_first",
    "probe_second",
    "probe text",
    7153,
)
_SHOWN: Sequence[Call] = (
    (_FIRST, {"key_a": _TEXT, "key_b": _NUMBER, "key_c": {"inner": [9241]}}),
    (_SECOND, {"key_a": _TEXT}),
)
_OTHERS: Sequence[Call] = (
    ("get-x", {"path": 'say "hi" <b>\n  and', "n": -2.5, "list": [{"a": "b"}, 1]}),
    ("f", {}),
    ("list_all", {"n": 3}),
)
_PARAMETERS: Json = {"type": "object", "properties": {"path": {"type": "string"}}}
_TOOLS: list[Json] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": _PARAMETERS}}
    for name, _ in (*_SHOWN, *_OTHERS)
]
_MAX_CHARACTERS = 1 << 16  # of a rendered conversation
_MARK = r"<[^<>\s]+>|\[[A-Z_]+\]"
_ANY = "\0"  # stands for the number or the id of a call
_COUNTED = re.compile(r"""(?<=[":])\d+(?=["<])|callid\d{3}""")
_NAME = r"(?P<name>[^\s\"'<>(){}\[\],]{1,256}?)"


def derived(source: str) -> CallFormat | None:
    """Return the notation of the calls that a template writes; None if it writes none, or in another way."""
    if "tool_calls" not in source:
        return None
    try:
        for is_named, in_text in product((False, True), repeat=2):
            template = _Template(source, is_named, in_text)
            for found in template.notations():
                if template.reads(_OTHERS[:1], found) and template.reads(_OTHERS, found):
                    return found
    except RenderTimeError:
        pass
    return None


@dataclass(frozen=True, slots=True)
class _Template:
    """Renders calls. `is_named`: their ids have their names, as Kimi's do. `in_text`: arguments are text."""

    source: str
    is_named: bool
    in_text: bool

    def notations(self) -> Iterator[CallFormat]:
        """Yield what the notation may be."""
        text = self._calls(_SHOWN)
        for separators in ((", ", ": "), (",", ":")):
            first, second, inner = (
                json.dumps(value, separators=separators)
                for value in (_SHOWN[0][1], _SHOWN[1][1], _SHOWN[0][1]["key_c"])
            )
            if gaps := _gaps(text, _FIRST, first, _SECOND, second):
                begin, after_name, between, _, end = gaps
                yield from self._format(text, begin, (after_name, between, end), None)
            for shown in (f'"{_TEXT}"', _TEXT):
                marks = ("key_a", shown, "key_b", str(_NUMBER), "key_c", inner, _SECOND, "key_a", shown)
                if gaps := _gaps(text, _FIRST, *marks):
                    begin, *values, _, _, between, _, _, end = gaps
                    for pairs, around in _pairs(values, between, end, is_quoted=shown != _TEXT):
                        yield from self._format(text, begin, around, pairs)

    def reads(self, wanted: Sequence[Call], calls: CallFormat) -> bool:
        """Whether the parser reads these calls, rendered, as they are."""
        parser = AnswerParser(AnswerFormat(calls), _TOOLS)
        message = message_of([*parser.feed(self._calls(wanted)), *parser.finish()])
        try:
            found = [(each.name, json.loads(each.arguments)) for each in message.tool_calls]
        except ValueError:
            return False
        return found == [*wanted] and not message.text.strip()

    def _calls(self, calls: Sequence[Call]) -> str:
        """Return how the template renders calls, without what is around every answer."""
        plain, text = self._rendered(_CONTENT), self._rendered("", calls)
        before, _, after = plain.partition(_CONTENT)
        text = text[len(_common(before, text)) :].lstrip()
        places = (text.rfind(after[:n]) for n in range(len(after), 2, -1))
        place = len(text) - len(after) if text.endswith(after) else max(next(places, -1), -1)
        return text[: place if place >= 0 else None].rstrip()

    def _rendered(self, content: str, calls: Sequence[Call] = ()) -> str:
        """Return a rendered conversation; "" if the template refuses it."""
        made = (
            ToolCall(f"functions.{name}:{i}" if self.is_named else f"callid{i:03}", name, json.dumps(given))
            for i, (name, given) in enumerate(calls)
        )
        messages = [Message("user", "probe"), Message("assistant", content, tool_calls=tuple(made))]
        forms = [each.as_dict(arguments_in_text=self.in_text) for each in messages]
        ends = {"bos_token": "", "eos_token": "", "documents": None, "add_generation_prompt": True}
        try:
            text = PROCESS.render(self.source, {"messages": forms, "tools": _TOOLS, **ends})
        except RenderTimeError:
            raise
        except RenderError:
            return ""
        return text if len(text) <= _MAX_CHARACTERS else ""

    def _format(
        self, text: str, begin: str, around: Sequence[str], pairs: Pairs | None
    ) -> Iterator[CallFormat]:
        """Yield the notation with these texts before, in, between and after calls, if a mark begins it."""
        begin, after_name, between, end = (_COUNTED.sub(_ANY, each) for each in (begin, *around))
        mark = re.match(rf"{_MARK}|<[^<>\n]+$|(?=[\[{{])", begin)
        if mark is None:
            return
        rest, gap = begin[mark.end() :], between.removesuffix(begin)
        is_pair = bool(mark[0]) and gap != between and gap.rstrip() == end  # each call has its own marks
        if is_pair:
            before_name, after_call, separator = rest, "", ""
        else:
            shared = re.search(r"[<{].*", _common(rest[::-1], between[::-1])[::-1], re.DOTALL)
            before_name = shared[0] if shared else ""
            gap = between.removesuffix(before_name)
            after_call = _common(gap, end)
            separator = gap[len(after_call) :]
        section, after = rest.removesuffix(before_name), end[len(after_call) :]
        separators = [] if is_pair else (_pieces(separator) or _pieces(after_call))[-1:]
        if (
            after_call[-1:] in ("}", ")") and "," not in separators
        ):  # a list, even if the template forgets the commas
            separators.append(",")
        yield CallFormat(
            marks=(text,),
            before_call=(*_parts(before_name), NAME, *_parts(after_name)),
            after_call=after_call,
            opening=tuple(filter(None, (mark[0], section))),
            closing=tuple(filter(None, re.split(rf"(?=(?:{_MARK})$)", after))),
            between_calls=None if is_pair else separator,
            between_pairs=gap[len(end) :] if is_pair else None,
            arguments="json" if pairs is None else "pairs",
            pairs=pairs,
            header=self._header(section, before_name, after_name, pairs),
            endings=tuple(dict.fromkeys([*_pieces(after_call + separator), *_pieces(after), *separators])),
            separators=tuple(separators),
            bare="" if mark[0] else begin[0],
            known_only=True,
        )

    def _header(self, section: str, before: str, after: str, pairs: Pairs | None) -> str:
        """Return the regular expression of what comes between a mark and the arguments of a call."""
        follows = r"\{" if pairs is None else r"\)|\w+\s*=" if pairs.is_keywords else "<"
        name = _NAME
        if self.is_named:
            name = rf"(?P<id>functions\.{_NAME}:\w+)"
            before, after = before.removesuffix("functions."), after.removeprefix(f":{_ANY}")
        return rf"(?:{_lenient(section)})?{_lenient(before)}\s*{name}{_lenient(after)}\s*(?={follows})"


def _pairs(
    values: Sequence[str], between: str, end: str, *, is_quoted: bool
) -> Iterator[tuple[Pairs, tuple[str, str, str]]]:
    """Yield how arguments are written one by one, and what is after a name, between calls and at the end.

    `values` are the texts before the first key, before text, before the second key and before a number.
    """
    before, before_text, middle, before_number = values
    if is_quoted:
        is_python = [each.strip() for each in values] == ["(", "=", ",", "="] and end.startswith(")")
        if is_python:
            yield Pairs("", before_text, "", between=middle, is_keywords=True), (before, between, end)
        return
    shared = re.search(r"<[^<]*$", _common(before[::-1], middle[::-1])[::-1])
    before_key = shared[0] if shared else ""
    closing, marks = middle.removesuffix(before_key), tuple(re.findall(_MARK, end))
    if shared and closing.strip() and marks[1:] and between.startswith(closing) and end.startswith(closing):
        before_json = before_number if before_number != before_text else ""
        rest = before.removesuffix(before_key), between.removeprefix(closing), end.removeprefix(closing)
        yield Pairs(before_key, before_text, closing, marks[1:], before_json), rest


def _gaps(text: str, *marks: str) -> list[str] | None:
    """Return the texts around these marks, which come in this order; None if one is missing."""
    found = []
    for mark in marks:
        gap, mark, text = text.partition(mark)
        if not mark:
            return None
        found.append(gap)
    return [*found, text]


def _common(first: str, second: str) -> str:
    """Return the common beginning of two texts."""
    n = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    return min(first, second, key=len) if n is None else first[:n]


def _pieces(text: str) -> list[str]:
    return re.findall(rf"{_MARK}|\w+|[^\w\s]", text)


def _parts(text: str) -> list[str]:
    """Return a text as parts of `CallFormat.before_call`."""
    return [INDEX if part == _ANY else part for part in re.split(f"({_ANY})", text) if part]


def _lenient(text: str) -> str:
    """Return a regular expression for a text with other spaces in it."""
    found, last = "", ""
    for piece in re.findall(r"\w+|[^\w\s]", text):
        is_between_words = re.match(r"\w", last) and re.match(r"\w", piece)
        found += r"\s+" if is_between_words else r"\s*"
        found += r"[\w.:-]+" if piece == _ANY else re.escape(piece)
        last = piece
    return found
