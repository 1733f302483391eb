"""Conversations as a chat template can take them.

Templates were written for conversations that begin with a user, alternate, and have one system message.
Clients send others: after a compaction no user message may be left. What a template refuses, or leaves out
without a word, is found out by rendering a probe once, as soon as a conversation needs the answer. Then its
messages are joined, completed or written in another form. tests/chat/test_accepted.py has a template for each
probe.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from llamaspec.chat.messages import Json, Message, ToolCall

# A template takes what a probe stands for if it writes the texts of all messages but results. A message with
# a call has no text, because many templates leave it out.
PROBES: Mapping[str, tuple[str, ...]] = {
    "a system message": ("system", "user"),
    "a system message before a call": ("system", "user", "assistant", "tool"),
    "only a system message": ("system",),
    "a later system message": ("system", "user", "assistant", "system", "user"),
    "no user message": ("system", "assistant", "tool"),
    "an answer first": ("assistant", "user"),
    "user, user": ("user", "user"),
    "assistant, assistant": ("user", "assistant", "assistant", "user"),
    "a user after a result": ("user", "assistant", "tool", "user"),
    "a result without its call": ("user", "tool"),
    "any id of a call": ("user", "assistant", "tool"),
}
# Where a role's content is written, as text or as parts of text.
_PLACES: Mapping[str, tuple[str, ...]] = {
    "user": ("user",),
    "system": ("system", "user"),
    "assistant": ("user", "assistant", "user"),
    "tool": ("user", "assistant", "tool"),
}
_REASONING = re.compile(r"\breasoning_content\b")
_OTHER_REASONING = re.compile(r"\breasoning\b")
_CALL = ToolCall("probecall", "probe", "{}")  # Mistral's templates need an id of nine characters
_LONG_ID = "call_0123456789abcdef"
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_BETWEEN = "OK."  # an answer between a call and a user; some templates refuse an empty one
PROBE_TOOL: Mapping[str, Json] = {
    "type": "function",
    "function": {
        "name": _CALL.name,
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}

Form = dict[str, Json]  # a message as a template gets it
Writes = Callable[[Sequence[Form], bool], str | None]  # renders messages; None if that is refused


class Accepted:
    """What one template takes. `writes` renders messages with it, and with a tool if so asked."""

    def __init__(self, source: str, writes: Writes) -> None:
        self._writes = writes
        self._is_reasoning_renamed = not _REASONING.search(source) and bool(_OTHER_REASONING.search(source))
        self._takes: dict[tuple[str, bool], bool] = {}
        self._wants_parts: dict[str, bool] = {}

    def takes(self, probe: str, *, with_tools: bool = False) -> bool:
        """Whether the template takes what a probe of PROBES stands for."""
        key = probe, with_tools
        if key not in self._takes:
            # A template that does not even write this needs more than a probe has, such as variables.
            is_telling = self._shows_probe(("user",), with_tools)
            call = replace(_CALL, id=_LONG_ID) if probe == "any id of a call" else _CALL
            self._takes[key] = not is_telling or self._shows_probe(PROBES[probe], with_tools, call)
        return self._takes[key]

    def messages(self, messages: Sequence[Message], *, with_tools: bool = False) -> list[Message]:
        """Return a conversation that the template takes and that says the same."""
        first, rest = self._one_system(messages)
        rest = self._with_calls(rest, with_tools)
        needs = ["a system message"]
        if any(each.role == "tool" for each in rest):
            needs.append("a system message before a call")
        if first and not self._takes_all(needs, with_tools=with_tools):
            text = first.pop().text
            if rest and rest[0].role == "user":
                rest[0] = replace(rest[0], text="\n\n".join(filter(None, (text, rest[0].text))))
            else:
                rest.insert(0, Message("user", text))
        needs = []
        if not rest and first:
            needs = ["only a system message"]
        elif rest and rest[0].role != "user":
            has_user = any(each.role == "user" for each in rest)
            needs = ["an answer first", *([] if has_user else ["no user message"])]
        if not self._takes_all(needs, with_tools=with_tools):
            rest.insert(0, Message("user", ""))
        rest = self._in_turns([self._without_space(message) for message in rest], with_tools)
        has_ids = any(each.tool_calls or each.role == "tool" for each in rest)
        if has_ids and not self.takes("any id of a call", with_tools=with_tools):
            rest = _with_short_ids(rest)
        return [*first, *rest]

    def _takes_all(self, probes: Sequence[str], *, with_tools: bool) -> bool:
        return all(self.takes(probe, with_tools=with_tools) for probe in probes)

    def form(self, message: Message, *, arguments_in_text: bool = False) -> Form:
        """Return a message in the form that the template reads."""
        form = message.as_dict(arguments_in_text=arguments_in_text)
        if self._is_reasoning_renamed and "reasoning_content" in form:
            form["reasoning"] = form.pop("reasoning_content")
        if self._reads_parts(message.role):
            form["content"] = _as_parts(message.text)
        return form

    @staticmethod
    def tools(tools: Sequence[Mapping[str, Json]]) -> list[Form]:
        """Return tools with `properties`, even if they are none: templates list them."""
        found = []
        for tool in tools:
            function = tool.get("function", {})
            parameters = {"type": "object", "properties": {}, **function.get("parameters", {})}
            found.append({**tool, "function": {**function, "parameters": parameters}})
        return found

    def _one_system(self, messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        """Return the system messages as one, if there are any, and the rest.

        Later ones stay where they are if the template accepts that, so that a cached beginning stays valid.
        """
        n = next((i for i, each in enumerate(messages) if each.role != "system"), len(messages))
        first, rest = list(messages[:n]), list(messages[n:])
        later = [each for each in rest if each.role == "system"]
        if later and not self.takes("a later system message"):
            first, rest = first + later, [each for each in rest if each.role != "system"]
        if not first:
            return [], rest
        return [replace(first[0], text="\n\n".join(each.text for each in first if each.text))], rest

    def _without_space(self, message: Message) -> Message:
        """Return an answer without the space that the template writes before it."""
        if message.role != "assistant" or not self._space:
            return message
        return replace(message, text=message.text.removeprefix(self._space))

    @cached_property
    def _space(self) -> str:
        """The space that the template writes before answers, but not at the end of a prompt.

        A model begins its answer with this space itself.
        """
        messages = _probe(_PLACES["assistant"])
        forms = [*map(self.form, messages)]
        prompt, written = (self._writes(each, False) or "" for each in (forms[:1], forms))
        space = written.removeprefix(prompt).partition(messages[1].text)[0]
        return space if space.isspace() else ""

    def _with_calls(self, messages: Sequence[Message], with_tools: bool) -> list[Message]:
        """Return messages with a call before each result whose call is gone, if the template insists on it.

        As text of the user, a result would have more weight than it should.
        """
        found: list[Message] = []
        ids, n_open = set[str | None](), 0  # of all calls so far; how many of these have no result yet
        for message in messages:
            is_lost = message.role == "tool" and not n_open and message.tool_call_id not in ids
            if is_lost and not self.takes("a result without its call", with_tools=with_tools):
                call = ToolCall(message.tool_call_id or "", message.name or "tool", "{}")
                found.append(Message("assistant", "", tool_calls=(call,)))
            found.append(message)
            ids.update(call.id for call in message.tool_calls)
            n_open = max(0, n_open + len(message.tool_calls) - (message.role == "tool"))
        return found

    def _in_turns(self, messages: Sequence[Message], with_tools: bool) -> list[Message]:
        """Join messages of one role in a row, and answer between calls and users, if the template insists."""
        found: list[Message] = []
        for message in messages:
            role, before = message.role, found[-1] if found else message
            probe = f"{role}, {role}"
            if role == "user" and (before.role == "tool" or before.tool_calls):
                if not self.takes("a user after a result", with_tools=with_tools):
                    found.append(Message("assistant", _BETWEEN))
                found.append(message)
            elif (
                found
                and role == before.role
                and probe in PROBES
                and not self.takes(probe, with_tools=with_tools)
            ):
                found[-1] = _joined(found[-1], message)
            else:
                found.append(message)
        return found

    def _reads_parts(self, role: str) -> bool:
        """Whether the template reads a role's content only as parts of text."""
        if role not in self._wants_parts:
            messages = _probe(_PLACES[role])
            text = next(each.text for each in messages if each.role == role)

            def shows(content: Json) -> bool:
                forms = [
                    {**each.as_dict(), "content": content} if each.role == role else self.form(each)
                    for each in messages
                ]
                return self._shows(forms, text, with_tools=False)

            self._wants_parts[role] = not shows(text) and shows(_as_parts(text))
        return self._wants_parts[role]

    def _shows_probe(self, roles: Sequence[str], with_tools: bool, call: ToolCall = _CALL) -> bool:
        messages = _probe(roles, call)
        forms = map(self.form, messages)
        texts = (each.text for each in messages if each.role != "tool")
        return self._shows([*forms], *texts, with_tools=with_tools)

    def _shows(self, forms: Sequence[Form], *texts: str, with_tools: bool) -> bool:
        written = self._writes(forms, with_tools)
        return written is not None and all(text in written for text in texts)


def _probe(roles: Sequence[str], call: ToolCall = _CALL) -> list[Message]:
    """Return a conversation of these roles; the answer before a result is a call."""
    found = []
    for i, role in enumerate(roles):
        calls = (call,) if role == "assistant" and roles[i + 1 : i + 2] == ("tool",) else ()
        found.append(Message(role, "" if calls else f"probe{i}", tool_calls=calls))
        if role == "tool":
            found[-1] = replace(found[-1], name=call.name, tool_call_id=call.id)
    return found


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which the ids of calls and results have nine letters or digits.

    An id depends only on the one given or, if there is none, on the place, so that a cached beginning stays
    valid. A result without the id of a call is that of the first call without a result.
    """
    found: list[Message] = []
    ids, unanswered = set[str](), list[str]()  # of calls
    for i, message in enumerate(messages):
        calls = tuple(
            replace(call, id=_short_id(call.id or f"{i}.{j}")) for j, call in enumerate(message.tool_calls)
        )
        unanswered += (call.id for call in calls)
        ids.update(call.id for call in calls)
        result_id = None
        if message.role == "tool":
            result_id = _short_id(message.tool_call_id or f"{i}")
            if result_id not in ids and unanswered:
                result_id = unanswered[0]
            if result_id in unanswered:
                unanswered.remove(result_id)
        found.append(replace(message, tool_calls=calls, tool_call_id=result_id))
    return found


def _short_id(given: str) -> str:
    if _SHORT_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]


def _as_parts(text: str) -> list[Form]:
    return [{"type": "text", "text": text}]


def _joined(first: Message, second: Message) -> Message:
    """Return two messages of one role as one."""
    texts, thoughts = (first.text, second.text), (first.reasoning, second.reasoning)
    return replace(
        first,
        text="\n\n".join(filter(None, texts)),
        tool_calls=first.tool_calls + second.tool_calls,
        reasoning="\n\n".join(filter(None, thoughts)) or None,
    )


def in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Json]]) -> list[Message]:
    """Return a conversation for a template without tools: the first message lists them, calls are text."""
    found: list[Message] = []
    before = ""  # role of the previous message
    for message in messages:
        functions = [call.as_dict()["function"] for call in message.tool_calls]
        calls = [json.dumps(function, ensure_ascii=False) for function in functions]
        text = "\n".join(filter(None, (message.text, *calls)))
        role = "user" if message.role == "tool" else message.role
        if "tool" in (message.role, before) and found and found[-1].role == role == "user":
            found[-1] = replace(found[-1], text=f"{found[-1].text}\n\n{text}")
        else:
            name = None if message.role == "tool" else message.name
            found.append(Message(role, text, name, reasoning=message.reasoning, place=message.place))
        before = message.role
    if tools and found:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        offer = f'Call a tool: answer with JSON, {{"name": …, "arguments": {{…}}}}. The tools are:\n{listed}'
        found[0] = replace(found[0], text=f"{offer}\n\n{found[0].text}")
    return found
