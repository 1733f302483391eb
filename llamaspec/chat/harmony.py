"""How an answer in gpt-oss's harmony format is read: messages with a channel and a recipient each.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>

The recipient may also stand before the channel. Source: github.com/openai/harmony, docs/format.md.
"""

from __future__ import annotations

import re
from typing import Protocol

from llamaspec.chat.answer_text import Held, MalformedError, Reading, Sink
from llamaspec.chat.reading_calls import Receiver

_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_HEADER = re.compile(r"\s*(assistant)?(\s*to=|\s*<\|channel\|>)")
_LONGEST_BEGINNING = 40
_MAX_HEADER = 512


class Thinker(Receiver, Protocol):
    """A receiver of reasoning, too."""

    def reasoning(self, text: str) -> None:
        """What the model thinks."""

    def think(self, is_thinking: bool) -> None:
        """From here on it is reasoning, or not any more."""


def read_harmony(to: Thinker) -> Reading[None]:
    """Messages until the answer ends. The prompt ends with <|start|>assistant."""
    goes_on = True
    while goes_on:
        held = Held()
        try:
            header = yield from _header(to, held)
        except MalformedError:
            to.content(held.text)
            header = ""
        end = yield from _body(to, header)
        if end is not None and end != "<|start|>":
            end = yield from to.incoming.until(("<|start|>",), to.content)
        goes_on = end is not None


def _header(to: Thinker, held: Held) -> Reading[str]:
    """What stands before <|message|>."""

    def sink(text: str) -> None:
        # As soon as it cannot be a header any more: an answer without one should not wait.
        for i, character in enumerate(text):
            held(character)
            n_held = len(held.text)
            if n_held > _MAX_HEADER or (n_held >= _LONGEST_BEGINNING and not _HEADER.match(held.text)):
                raise MalformedError(text[i + 1 :])

    if (yield from to.incoming.until(("<|message|>",), sink)) is None or not _HEADER.match(held.text):
        raise MalformedError
    return held.text


def _body(to: Thinker, header: str) -> Reading[str | None]:
    """What stands behind <|message|>; how it ends."""
    recipient = (re.findall(r"to=([^\s<]+)", header) or [""])[-1]
    channel = (re.findall(r"<\|channel\|>\s*(\w+)", header) or [""])[-1]
    sink: Sink = to.content
    if to.schemas and recipient.startswith("functions.") and recipient != "functions.":
        to.begin_call(recipient.removeprefix("functions."))
        sink = to.arguments
    elif channel == "analysis" and recipient in ("", "assistant"):
        to.think(True)
        sink = to.reasoning
    end = yield from to.incoming.until(_ENDS, sink)
    if sink == to.reasoning:
        to.think(False)
    return end
