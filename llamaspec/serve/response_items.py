"""The output items of `/v1/responses`, and the events in which they grow."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from llamaspec.chat.answers import ArgumentsDelta, CallDelta, ReasoningDelta
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.deltas import Content, Said, Whole
from llamaspec.serve.probabilities import token_list

Data = dict[str, Any]

# kind of item -> (its part, the name of the part's text in events, prefix of its id)
_PARTS = {
    "message": ("output_text", "output_text", "msg"),
    "reasoning": ("reasoning_text", "reasoning_text", "rs"),
}


class Items:
    """Builds the items of one answer: each is opened, grows, and is closed before the next.

    Parameters
    ----------
    vocabulary : LlamaVocabulary, optional
        Where it is to be told how probable tokens were.
    """

    def __init__(self, vocabulary: LlamaVocabulary | None = None) -> None:
        self.done: list[Data] = []  # complete items
        self._vocabulary = vocabulary
        self._logprobs: list[Data] = []  # of the open item
        self._item: Data | None = None
        self._text = ""

    def say(self, said: Said) -> list[Data]:
        """The events of a delta, without their numbers."""
        if isinstance(said, CallDelta):
            call = {"type": "function_call", "id": _new_id("fc"), "call_id": said.id, "name": said.name}
            return self._change({**call, "arguments": "", "status": "in_progress"})
        begun: list[Data] = []
        if not isinstance(said, ArgumentsDelta):
            kind = "message" if isinstance(said, Content) else "reasoning"
            if self._item is None or self._item["type"] != kind:
                begun = self._change(_text_item(kind))
        self._text += said.text
        name = "function_call_arguments" if isinstance(said, ArgumentsDelta) else _name(said)
        delta = {"type": f"response.{name}.delta", "delta": said.text, **self._place()}
        if isinstance(said, Content):
            delta["logprobs"] = self._told(said)
            self._logprobs += delta["logprobs"]
        return [*begun, delta]

    def finish(self, status: str) -> list[Data]:
        """The events that close the open item, if there is one."""
        item = self._item
        if item is None:
            return []
        place, text = self._place(), self._text
        item["status"] = status
        events: list[Data] = []
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append({"type": "response.function_call_arguments.done", "arguments": text,
                           "name": item["name"], **place})  # fmt: skip
        else:
            part = _part(item["type"], text, self._logprobs)
            item["content"] = [part]
            done: Data = {"type": f"response.{_PARTS[item['type']][1]}.done", "text": text, **place}
            if item["type"] == "message":
                done["logprobs"] = self._logprobs
            events += [done, {"type": "response.content_part.done", "part": part, **place}]
        index = {"output_index": len(self.done), "item": item}
        events.append({"type": "response.output_item.done", **index})
        self.done.append(item)
        self._item, self._text, self._logprobs = None, "", []
        return events

    def _change(self, item: Data) -> list[Data]:
        """Close the open item and open another."""
        events = self.finish("completed")
        self._item = item
        events.append(
            {"type": "response.output_item.added", "output_index": len(self.done), "item": dict(item)}
        )
        if item["type"] != "function_call":
            part = _part(item["type"], "")
            events.append({"type": "response.content_part.added", "part": part, **self._place()})
        return events

    def _told(self, said: Content) -> list[Data]:
        return [] if self._vocabulary is None else token_list(said.logprobs, self._vocabulary)

    def _place(self) -> Data:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self.done)}
        return place if self._item["type"] == "function_call" else {**place, "content_index": 0}


def whole_items(row: Whole, status: str, vocabulary: LlamaVocabulary | None = None) -> list[Data]:
    """The items of a complete answer."""
    items = Items(vocabulary)
    message = row.message
    said: list[Said] = [ReasoningDelta(message.reasoning)] if message.reasoning else []
    if message.text or not (message.reasoning or message.tool_calls):
        said.append(Content(message.text, logprobs=row.logprobs))
    for i, call in enumerate(message.tool_calls):
        said += [CallDelta(i, call.id, call.name), ArgumentsDelta(i, call.arguments)]
    for one in said:
        items.say(one)
    items.finish(status)
    return items.done


def _name(said: Content | ReasoningDelta) -> str:
    return "output_text" if isinstance(said, Content) else "reasoning_text"


def _text_item(kind: str) -> Data:
    item: Data = {"type": kind, "id": _new_id(_PARTS[kind][2]), "status": "in_progress", "content": []}
    return {**item, "role": "assistant"} if kind == "message" else {**item, "summary": []}


def _part(kind: str, text: str, logprobs: Sequence[Data] = ()) -> Data:
    part: Data = {"type": _PARTS[kind][0], "text": text}
    return {**part, "annotations": [], "logprobs": list(logprobs)} if kind == "message" else part


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
