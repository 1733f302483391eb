"""The reader of Gemma 4's calls, whose arguments are JSON but for keys and strings."""

from __future__ import annotations

import json

from llamaspec.chat.answer_text import Held, Reading
from llamaspec.chat.reading_calls import Receiver, both, escaped, expect, is_json, or_content, short


def read_gemma4(to: Receiver) -> Reading[None]:
    """<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>."""
    while (yield from to.incoming.until(("<|tool_call>",), to.content)):
        held = Held("<|tool_call>")
        if (yield from or_content(to, held, _gemma_call(to, held))):
            yield from to.incoming.takes("<tool_call|>")


def _gemma_call(to: Receiver, held: Held) -> Reading[None]:
    """call:name{…}, whose keys are bare and whose strings stand between <|"|>."""
    incoming = to.incoming
    expect((yield from incoming.takes("call:", held)))
    name = Held()
    expect(bool((yield from incoming.until(("{",), short(both(held, name))))))
    held("{")
    expect(bool(name.text.strip()))
    to.begin_call(name.text.strip())
    to.arguments("{")
    depth = 1
    while depth:
        word = Held()
        mark = yield from incoming.until(('<|"|>', "{", "}", "[", "]", ",", ":"), word)
        expect(mark is not None)
        text = word.text.strip()
        if mark == ":":
            to.arguments(f"{json.dumps(text, ensure_ascii=False)}: ")
        elif mark == '<|"|>':
            to.arguments('"')
            expect(bool((yield from incoming.until(('<|"|>',), escaped(to.arguments)))))
            to.arguments('"')
            key_or_value = yield from incoming.next_character()
            if key_or_value == ":":  # a key in quotes
                yield from incoming.takes(":")
                to.arguments(": ")
        else:
            to.arguments(_word(text) + (", " if mark == "," else str(mark)))
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark or "", 0)


def _word(text: str) -> str:
    """A bare word as JSON."""
    return text if not text or is_json(text, set()) else json.dumps(text, ensure_ascii=False)
