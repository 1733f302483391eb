"""Readers of calls whose arguments are JSON: Hermes, Qwen, Llama 3, Mistral, DeepSeek, Kimi."""

from __future__ import annotations

from collections.abc import Callable

from llamaspec.chat.answer_text import Held, Incoming, Reading, Sink, nowhere
from llamaspec.chat.reading_calls import Receiver, both, expect, loaded, or_content, short

_ARGUMENTS = ("arguments", "parameters")


def read_hermes(to: Receiver) -> Reading[None]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, perhaps several."""
    while (yield from to.incoming.until(("<tool_call>",), to.content)):
        held = Held("<tool_call>")
        if (yield from or_content(to, held, _object(to, held))):
            yield from to.incoming.space()
            yield from to.incoming.takes("</tool_call>")


def read_llama3(to: Receiver) -> Reading[None]:
    """{"name": …, "parameters": {…}} as the whole answer, or behind <|python_tag|>."""
    mark: str | None = ""
    while mark is not None:
        is_next = True
        while is_next:
            held = Held(mark)
            is_call = yield from or_content(to, held, _object(to, held, known_only=True))
            if is_call:
                yield from to.incoming.space()
            is_next = is_call and (yield from to.incoming.takes(mark := ";"))
        mark = yield from to.incoming.until(("<|python_tag|>",), to.content)


def read_mistral(to: Receiver) -> Reading[None]:
    """[TOOL_CALLS] and a list of objects, one object, or name[ARGS]{…}."""
    while (yield from to.incoming.until(("[TOOL_CALLS]",), to.content)):
        held = Held("[TOOL_CALLS]")
        yield from or_content(to, held, _mistral_calls(to, held))


def read_deepseek(to: Receiver) -> Reading[None]:
    """Name and arguments in a section of calls; R1 and V3 write more around them.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>,
    or function<｜tool▁sep｜>name, a line ```json, {…}, and a line ```.
    """
    marks = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>")
    yield from _sections(to, marks, _deepseek_call)


def read_kimi(to: Receiver) -> Reading[None]:
    """<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|> in a section."""
    marks = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_calls_section_end|>")
    yield from _sections(to, marks, _kimi_call)


def _mistral_calls(to: Receiver, held: Held) -> Reading[None]:
    """What stands behind [TOOL_CALLS]."""
    yield from to.incoming.space(held)
    first = yield from to.incoming.next_character()
    if first == "{":
        yield from _object(to, held)
        return
    if first != "[":
        yield from _name_and_arguments(to, held)
        return
    goes_on = yield from to.incoming.takes("[", held)
    while goes_on:
        yield from _object(to, held)
        yield from to.incoming.space()
        goes_on = yield from to.incoming.takes(",")
    yield from to.incoming.takes("]")


def _object(to: Receiver, held: Held, *, known_only: bool = False) -> Reading[None]:
    """{"name": …, "arguments": {…}}, whatever the order and whatever else it says."""
    incoming, name, early, n_before = to.incoming, "", "", to.n_calls
    yield from incoming.space(held)
    expect((yield from incoming.takes("{", held)))
    while True:
        is_begun = to.n_calls > n_before
        sink: Sink = nowhere if is_begun else held
        yield from incoming.space(sink)
        key = yield from _string(incoming, sink)
        yield from incoming.space(sink)
        expect((yield from incoming.takes(":", sink)))
        yield from incoming.space(sink)
        if key == "name" and not is_begun:
            name = yield from _string(incoming, sink)
            expect(bool(name) and (name in to.schemas or not known_only))
            if early:
                to.begin_call(name)
                to.arguments(early)
        elif key in _ARGUMENTS and not is_begun and not early:
            if name and (yield from incoming.next_character()) == "{":
                to.begin_call(name)
                expect((yield from incoming.json_value(to.arguments)))
            else:
                early = yield from _other_arguments(incoming, held)
                if name:
                    to.begin_call(name)
                    to.arguments(early)
        else:
            expect((yield from incoming.json_value(sink)))
        sink = nowhere if to.n_calls > n_before else held
        yield from incoming.space(sink)
        if not (yield from incoming.takes(",", sink)):
            break
    expect((yield from incoming.takes("}", sink)))
    expect(to.n_calls > n_before)


def _string(incoming: Incoming, sink: Sink) -> Reading[str]:
    """A string of JSON, decoded."""
    expect((yield from incoming.next_character()) == '"')
    text = Held()
    is_whole = yield from incoming.json_value(both(sink, text))
    value = loaded(text.text) if is_whole else None
    expect(isinstance(value, str))
    return str(value)


def _other_arguments(incoming: Incoming, held: Held) -> Reading[str]:
    """Arguments before the name, or JSON in a string, or none."""
    text = Held()
    expect((yield from incoming.json_value(both(held, text))))
    value = loaded(text.text)
    if isinstance(value, str):
        value, text = loaded(value), Held(value)
    expect(value is None or isinstance(value, dict))
    return "{}" if value is None else text.text


def _name_and_arguments(to: Receiver, held: Held) -> Reading[None]:
    """name[ARGS]{…}, perhaps with [CALL_ID]… between."""
    name = Held()
    mark = yield from to.incoming.until(("[ARGS]", "[CALL_ID]"), short(both(held, name)))
    expect(bool(mark and name.text.strip()))
    held(mark or "")
    if mark == "[CALL_ID]":
        expect(bool((yield from to.incoming.until(("[ARGS]",), short(held)))))
        held("[ARGS]")
    yield from to.incoming.space(held)
    yield from _arguments(to, name.text, None)


def _sections(
    to: Receiver, marks: tuple[str, str, str], read_call: Callable[[Receiver, Held], Reading[None]]
) -> Reading[None]:
    """Sections of calls between marks; a model may forget to open one."""
    opening, call, closing = marks

    def section(mark: str, held: Held) -> Reading[None]:
        if mark == opening:
            yield from to.incoming.space(held)
            expect((yield from to.incoming.takes(call, held)))
        goes_on = True
        while goes_on:
            yield from read_call(to, held)
            yield from to.incoming.space()
            goes_on = yield from to.incoming.takes(call)
        yield from to.incoming.takes(closing)

    while mark := (yield from to.incoming.until((opening, call), to.content)):
        held = Held(mark)
        yield from or_content(to, held, section(mark, held))


def _deepseek_call(to: Receiver, held: Held) -> Reading[None]:
    incoming, name = to.incoming, Held()
    expect(bool((yield from incoming.until(("<｜tool▁sep｜>",), short(both(held, name))))))
    held("<｜tool▁sep｜>")
    is_fenced = (yield from incoming.next_character()) != "{"
    if is_fenced:
        name = Held()
        expect(bool((yield from incoming.until(("\n```json\n",), short(both(held, name))))))
        held("\n```json\n")
    yield from _arguments(to, name.text, None)
    if is_fenced:
        expect((yield from incoming.takes("\n```")))
    yield from incoming.space()
    expect((yield from incoming.takes("<｜tool▁call▁end｜>")))


def _kimi_call(to: Receiver, held: Held) -> Reading[None]:
    call_id = Held()
    mark = "<|tool_call_argument_begin|>"
    expect(bool((yield from to.incoming.until((mark,), short(both(held, call_id))))))
    held(mark)
    written = call_id.text.strip()
    yield from to.incoming.space(held)
    yield from _arguments(to, written.removeprefix("functions.").rpartition(":")[0], written)
    yield from to.incoming.space()
    expect((yield from to.incoming.takes("<|tool_call_end|>")))


def _arguments(to: Receiver, name: str, call_id: str | None) -> Reading[None]:
    """An object, of a call whose name is known."""
    expect(bool(name.strip()) and (yield from to.incoming.next_character()) == "{")
    to.begin_call(name.strip(), call_id)
    expect((yield from to.incoming.json_value(to.arguments)))
