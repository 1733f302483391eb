"""Parses a streamed answer: text, reasoning, tool calls.

Pieces of text go in, deltas come out. Readers are generators over the text that has arrived
(`chat/incoming.py`), so it makes no difference how the text is split. Text that does not follow the format of
the family (`chat/notation.py`) is content. The parser holds back only a possible beginning of a mark or call.
tests/chat/test_parse.py splits recorded answers of each family at every place.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence

from llamaspec.chat import xml_values
from llamaspec.chat.incoming import MAX_HEADER, MAX_SPACE, Incoming, Reading
from llamaspec.chat.known_tools import KnownTools
from llamaspec.chat.messages import (
    ArgumentsDelta,
    CallDelta,
    ContentDelta,
    Delta,
    Json,
    ReasoningDelta,
    ToolCall,
    message_of,
)
from llamaspec.chat.notation import AnswerFormat, CallFormat, Pairs, Reasoning
from llamaspec.chat.xml_values import json_or_text, python_or_text, quoted

_FENCE = "```"
_HARMONY_HEADER = re.compile(r"\s*(assistant)?\s*(to=|<\|channel\|>).*?<\|message\|>", re.DOTALL)
_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_GEMMA_MARKS = ('<|"|>', "{", "}", "[", "]", ",", ":")


class AnswerParser:
    """Parses one answer.

    The model may call `tools`, in OpenAI's form; without tools, calls are ordinary text. `thinking` means
    that the prompt ends with the mark that opens reasoning (`AnswerFormat.begins_thinking`).

    Examples
    --------
    >>> parser = AnswerParser(AnswerFormat(None, Reasoning("<think>", "</think>")))
    >>> [*parser.feed("<thi"), *parser.feed("nk>Hm.</think>Yes"), *parser.finish()]
    [ReasoningDelta(text='Hm.'), ContentDelta(text='Yes')]
    """

    def __init__(
        self, answer_format: AnswerFormat, tools: Sequence[Mapping[str, Json]] = (), *, thinking: bool = False
    ) -> None:
        self._tools = KnownTools(tools)
        self.answer_format = answer_format
        self.is_thinking = thinking  # the next text is reasoning
        self._incoming = Incoming()
        self._n_calls = 0  # calls that have begun
        self._deltas: list[Delta] = []
        self._space, self._space_end = "", 0  # whitespace at the end of the text so far, and its place
        self._is_at_start = False  # drop empty lines before the text that follows
        self._second_end = ""  # a mark that may end the reasoning once more
        self._is_code = False  # whether the content so far has an odd number of backticks
        self._reading = self._read()

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that a piece of text makes certain."""
        self._incoming.text += text
        self._incoming.n_fed += len(text)
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return the last deltas; no text follows.

        `is_cut` means that the model would have continued. Then a call without arguments is left out.
        """
        self._incoming.is_complete, self._incoming.is_cut = True, is_cut
        deltas = self._advance()
        if self._space and not self._n_calls:
            deltas.append(ContentDelta(self._space, end=self._space_end))
        self._space = ""
        return deltas

    def _advance(self) -> list[Delta]:
        next(self._reading, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    # Readers pass on text and calls by these methods.

    def _content(self, text: str) -> None:
        self._is_code ^= text.count("`") % 2 == 1
        self._text(text, ContentDelta)

    def _reasoning(self, text: str) -> None:
        self._text(text, ReasoningDelta)

    def _text(self, text: str, kind: type[ContentDelta] | type[ReasoningDelta]) -> None:
        """Pass on text; hold back whitespace at its end if the parser would drop it before a mark."""
        if self._is_at_start:
            text = text.lstrip("\n")
        if not text:
            return
        self._is_at_start = False
        text_end = self._incoming.n_fed - len(self._incoming.text)
        if self._space and text_end - len(text) != self._space_end:  # a mark came between
            self._add(kind, self._space, self._space_end)
            self._space = ""
        text = self._space + text
        may_be_dropped = kind is ReasoningDelta or (
            self.answer_format.calls is not None and self._tools.schemas
        )
        end = max(len(text.rstrip()), len(text) - MAX_SPACE) if may_be_dropped else len(text)
        text, self._space = text[:end], text[end:]
        self._space_end, text_end = text_end, text_end - len(self._space)
        if text:
            self._add(kind, text, text_end)

    def _add(self, kind: type[ContentDelta] | type[ReasoningDelta], text: str, end: int) -> None:
        self._deltas.append(ContentDelta(text, end=end) if kind is ContentDelta else ReasoningDelta(text))

    def _begin_text(self) -> None:
        """Begin another text; empty lines between two texts belong to neither."""
        self._space, self._is_at_start = "", True

    def _begin_call(self, name: str, call_id: str = "") -> None:
        self._begin_text()
        random_id = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        # Mistral's templates need such an id.
        self._deltas.append(CallDelta(self._n_calls, call_id or random_id, name))
        self._n_calls += 1

    def _arguments(self, text: str) -> None:
        self._deltas.append(ArgumentsDelta(self._n_calls - 1, text))

    # Readers.

    def _read(self) -> Reading[None]:
        calls, reasoning = self.answer_format.calls, self.answer_format.reasoning
        if calls is not None and calls.arguments == "channels":
            yield from self._read_channels()
        elif reasoning is not None:
            yield from self._read_reasoning(reasoning)
        if calls is not None and self._tools.schemas:
            yield from self._read_calls(calls)
        yield from self._read_content(())

    def _read_reasoning(self, marks: Reasoning) -> Reading[None]:
        """Read the reasoning, if the answer begins with it."""
        if not self.is_thinking:
            if not (yield from self._incoming.begins(marks.opening)):
                return
            yield from self._incoming.until((marks.opening,), None)
        yield from self._read_thoughts((marks.closing,))
        self._second_end = marks.closing

    def _read_thoughts(self, ends: Sequence[str]) -> Reading[str | None]:
        """Read reasoning up to one of these ends; return the end. Some models call before they end it."""
        calls = self.answer_format.calls
        starts = _starts(calls) if calls is not None and calls.closing and self._tools.schemas else ()
        self.is_thinking = True
        self._begin_text()
        while (mark := (yield from self._incoming.until((*ends, *starts), self._reasoning))) in starts:
            assert calls is not None
            if not (yield from self._read_whole_call(calls, mark, ends[0])):
                self._reasoning(mark)
        self.is_thinking = False
        self._begin_text()
        return mark

    def _read_whole_call(self, calls: CallFormat, mark: str, limit: str) -> Reading[bool]:
        """Read a complete call of a known tool after a mark, before `limit`; without one, take nothing."""
        header = yield from self._incoming.match(re.compile(calls.header))
        if header is None or header["name"] not in self._tools.schemas:
            return False
        closing, n = calls.closing[-1].strip(), 0
        while True:
            place = self._incoming.text.find(closing, n)
            if place >= 0:
                n = place + len(closing)
                if found := self._calls_in(calls, mark + self._incoming.text[:n]):
                    self._incoming.take(n)
                    for call in found:
                        self._begin_call(call.name, call.id)
                        self._arguments(call.arguments)
                    return True
            elif self._incoming.is_complete or limit in self._incoming.text:
                return False
            else:
                yield

    def _calls_in(self, calls: CallFormat, text: str) -> tuple[ToolCall, ...]:
        """Return the calls of which a text consists; none if it has anything else."""
        parser = AnswerParser(AnswerFormat(calls), self._tools.tools)
        message = message_of([*parser.feed(text), *parser.finish()])
        try:
            are_objects = all(isinstance(json.loads(each.arguments), dict) for each in message.tool_calls)
        except (ValueError, RecursionError):
            return ()
        return message.tool_calls if are_objects and not message.text else ()

    def _read_content(self, marks: Sequence[str]) -> Reading[str | None]:
        """Pass on content up to one of these marks, and take it.

        A mark at the end of a line that ends the reasoning once more is left out, except in code.
        """
        again = self._second_end
        ends = (f"{again}\n", again) if again else ()
        while True:
            mark = yield from self._incoming.until((*marks, *ends[:1]), self._content, ends[1:])
            if mark is None or mark not in ends:
                return mark
            self._incoming.text = mark[len(again) :] + self._incoming.text
            if self._is_code:
                self._content(again)

    def _read_calls(self, calls: CallFormat) -> Reading[None]:
        """Read content, and a call after each mark that starts one."""
        starts = _starts(calls)
        if calls.may_lack_marks:
            starts = (*starts, _FENCE)
            yield from self._read_unmarked("")
        mark: str | None = ""
        if not (calls.bare and (yield from self._incoming.begins(calls.bare))):
            mark = yield from self._read_content(starts)
        while mark is not None:
            if mark == _FENCE:
                yield from self._read_unmarked(mark)
                mark = ""
            else:
                mark = yield from self._read_call(calls, mark)
            if not mark:
                mark = yield from self._read_content(starts)

    def _read_unmarked(self, fence: str) -> Reading[None]:
        """Read calls as plain JSON, perhaps in a fence; pass on complete ones. The rest is content."""
        before, begin = fence, '{"name":"'
        while (yield from self._incoming.begins_spaced(begin, *(["json" + begin] if fence else []))):
            n = self._incoming.text.index("{")
            written = [before, self._incoming.text[:n]]
            self._incoming.take(n)
            yield from self._incoming.json_object(written.append)
            text, is_cut = "".join(written[2:]), self._incoming.is_cut and not self._incoming.text
            call = self._tools.call_in(text, is_cut=is_cut)
            if call is None:
                self._content("" if is_cut else "".join(written))
                return
            self._begin_call(call.name)
            self._arguments(call.arguments)
            before = ""
            if (yield from self._incoming.drop((fence,) if fence else ())):
                return
        self._content(before)

    def _read_call(self, calls: CallFormat, mark: str) -> Reading[str]:
        """Read a call after a mark, otherwise pass on the mark; return a separator before another call."""
        header = yield from self._incoming.match(re.compile(calls.header))
        if header is None and self._incoming.is_cut and mark and len(self._incoming.text) < MAX_HEADER:
            self._incoming.text = ""
            return ""
        if header is None or (calls.known_only and header["name"] not in self._tools.schemas):
            self._content("" if mark in calls.separators else mark)
            return ""
        self._incoming.take(len(header[0]))
        self._begin_call(header["name"].strip(), header.groupdict().get("id", ""))
        if calls.pairs is not None and calls.pairs.is_keywords:
            yield from self._read_keywords()
        elif calls.pairs is not None:
            yield from self._read_pairs(calls.pairs, self._tools.schemas.get(header["name"], {}))
        elif calls.arguments == "json":
            yield from self._incoming.json_object(self._arguments)
        else:
            yield from self._read_gemma()
        last = yield from self._incoming.drop(calls.endings)
        return last if last in calls.separators else ""

    def _read_pairs(self, pairs: Pairs, schema: Mapping[str, Json]) -> Reading[None]:
        """Read <parameter=key>value</parameter></function>; strings are passed on as they arrive."""
        begin, opening = pairs.before_key.strip(), "{"
        key_ends = {each.rstrip("\n"): each for each in (pairs.before_value, pairs.before_json) if each}
        key_ends |= {re.sub(r"\s*\n\s*", "", end): each for end, each in key_ends.items()}
        properties = schema.get("properties")
        while (mark := (yield from self._incoming.until((begin, *pairs.ends), None))) == begin:
            key, end = yield from self._word([*key_ends])
            written = key_ends.get(end or "", "")
            if written.endswith("\n"):
                yield from self._incoming.match(re.compile(r"(?s:.)"))  # wait for one character
                self._incoming.take(int(self._incoming.text.startswith("\n")))
            self._arguments(f"{opening}{quoted(key)}: ")
            opening = ", "
            inner = properties.get(key) if isinstance(properties, Mapping) else None
            is_text = (
                written == pairs.before_value if pairs.before_json else xml_values.is_text(inner, schema)
            )
            if is_text:
                yield from self._read_string(pairs.value_ends, pairs.last_value_ends, pairs.closing)
            else:
                word: list[str] = []
                last = pairs.last_value_ends
                end = yield from self._incoming.until(pairs.value_ends, word.append, last)
                self._put_back_after(pairs.closing, end)
                self._arguments(xml_values.as_json("".join(word), inner, schema))
        if mark is not None:
            self._arguments("{}" if opening == "{" else "}")
            self._incoming.text = mark + self._incoming.text

    def _put_back_after(self, closing: str, end: str | None) -> None:
        """Put back what the end of a value contains after its closing mark."""
        if end is not None:
            self._incoming.text = end.partition(closing)[2] + self._incoming.text

    def _read_keywords(self) -> Reading[None]:
        """Read Python's key="text", other=[1, True]), after the parenthesis that opens it."""
        opening = "{"
        while True:
            key, mark = yield from self._word(("=", ")"))
            if mark == ")":
                self._arguments("{}" if opening == "{" else "}")
                self._incoming.text = mark + self._incoming.text
            if mark != "=":
                return
            self._arguments(f"{opening}{quoted(key.strip(', ' + chr(10)))}: ")
            opening = ", "
            value = yield from self._incoming.python_value()
            self._arguments(python_or_text(value.strip()))

    def _read_gemma(self) -> Reading[None]:
        """Read {key:<|"|>text<|"|>,other:1}, after its first brace."""
        self._arguments("{")
        depth = 1
        while depth:
            text, mark = yield from self._word(_GEMMA_MARKS)
            text = text.strip()
            if mark is None:
                return
            if mark == ":":
                self._arguments(f"{quoted(text)}: ")
            elif mark == '<|"|>':
                yield from self._read_string((mark,))
            else:
                self._arguments((json_or_text(text) if text else "") + (", " if mark == "," else mark))
                depth += {"{": 1, "[": 1, ",": 0}.get(mark, -1)

    def _word(self, ends: Sequence[str]) -> Reading[tuple[str, str | None]]:
        """Return a text up to one of these ends, and the end."""
        word: list[str] = []
        end = yield from self._incoming.until(ends, word.append)
        return "".join(word), end

    def _read_string(self, ends: Sequence[str], last: Sequence[str] = (), closing: str = "") -> Reading[None]:
        """Read a text up to its end, as a JSON string."""
        self._arguments('"')
        end = yield from self._incoming.until(ends, lambda text: self._arguments(quoted(text)[1:-1]), last)
        if closing:
            self._put_back_after(closing, end)
        if end is not None:
            self._arguments('"')

    def _read_channels(self) -> Reading[None]:
        """Read messages, each with a channel and a recipient. The prompt ends with <|start|>assistant.

            <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
            <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>

        The recipient may also come before the channel. Source: github.com/openai/harmony, docs/format.md.
        """
        end: str | None = "<|start|>"
        while end is not None:
            found = yield from self._incoming.match(_HARMONY_HEADER)
            header = "" if found is None else found[0]
            self._incoming.take(len(header))
            recipient = (re.findall(r"to=([^\s<]+)", header) or [""])[-1]
            channel = (re.findall(r"<\|channel\|>\s*(\w+)", header) or [""])[-1]
            name = self._tools.recipient(recipient)
            if name is not None:
                self._begin_call(name)
                if (yield from self._incoming.begins("{")):  # marks in its strings are text
                    yield from self._incoming.json_object(self._arguments)
                end = yield from self._incoming.until(_HARMONY_ENDS, self._arguments)
            elif channel == "analysis" and recipient in ("", "assistant"):
                end = yield from self._read_thoughts(_HARMONY_ENDS)
            else:
                end = yield from self._incoming.until(_HARMONY_ENDS, self._content)
            if end is not None and end != "<|start|>":
                end = yield from self._incoming.until(("<|start|>",), self._content)


def _starts(calls: CallFormat) -> tuple[str, ...]:
    """Return the marks before a call."""
    return calls.starts or (() if calls.bare else calls.opening[:1])
