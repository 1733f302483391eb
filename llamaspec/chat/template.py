"""Messages, and chat templates, which turn a conversation into the text that a model was trained to read.

A template is a Jinja program in a model's file. It runs in a sandboxed process (`chat/sandbox.py`), with text
from users, tools and clients escaped (`chat/escaping.py`). Any error in it becomes one line.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pydantic_core import from_json

from llamaspec.chat.escaping import Escaper, Json, Rendered, SpecialTokens, texts_in
from llamaspec.chat.sandbox import PROCESS, RenderError, RenderTimeError
from llamaspec.errors import ModelFileError, PromptError
from llamaspec.llama.model import LlamaModel

KEY = "tokenizer.chat_template"
RESERVED = frozenset(  # variables that `template_kwargs` may not replace
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception",
     "strftime_now"}
)  # fmt: skip
ROLES = ("system", "user", "assistant", "tool")


class NoTemplateError(ModelFileError):
    """A model's file has no chat template."""


class TemplateError(PromptError):
    """A chat template is invalid, or refuses a conversation."""


class SystemPromptError(TemplateError):
    """A chat template refuses the system prompt."""


class TemplateTimeError(TemplateError):
    """A chat template takes too much time or memory."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the assistant wants called."""

    id: str
    name: str
    arguments: str  # JSON as the model wrote it; may be invalid


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation; ValueError if the role is unknown."""

    role: str  # system, user, assistant or tool
    text: str
    name: str | None = None  # of the speaker, or of the tool whose result this is
    tool_calls: tuple[ToolCall, ...] = ()  # only of the assistant
    tool_call_id: str | None = None  # the call whose result this is
    reasoning: str | None = None  # before the assistant's answer
    place: str = field(default="", compare=False)  # in the request, such as messages.3, for errors

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"a message is from {', '.join(ROLES)}, got {self.role!r}")


class ChatTemplate:
    """Renders conversations for one model; TemplateError if the source is not valid Jinja.

    `bos` and `eos` are the spellings of the model's tokens for the beginning and the end of a text, "" if it
    has none; `special` are all its control tokens, by default these two.
    """

    def __init__(self, source: str, bos: str, eos: str, special: SpecialTokens | None = None) -> None:
        self.source = source
        self._ends = {"bos_token": bos, "eos_token": eos}
        self._special = SpecialTokens((bos, eos)) if special is None else special
        try:
            PROCESS.check(source)
        except RenderError as error:
            raise TemplateError(f"the chat template is not valid: {error}; give another template") from error

    @classmethod
    def of(cls, model: LlamaModel, source: str | None = None) -> ChatTemplate:
        """Return the template in a model's file, or `source` instead; NoTemplateError if there is none."""
        if source is None:
            source = model.metadata(KEY)
        if source is None:
            raise NoTemplateError(
                f"{model.path} has no chat template: it was trained to continue text, not to chat; choose "
                f"an instruction-tuned model, or give a template"
            )
        words = model.vocabulary
        ends = [words.text(i).decode(errors="replace") if i >= 0 else "" for i in (words.bos, words.eos)]
        return cls(source, ends[0], ends[1], SpecialTokens(words.controls))

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows the model the tools."""
        return re.search(r"\btools\b", self.source) is not None

    @cached_property
    def takes_later_system(self) -> bool:
        """Whether a system message may follow others and is rendered."""
        roles = ("system", "user", "assistant", "system", "user")
        messages = [Message(role, f"text {i}") for i, role in enumerate(roles)]
        try:
            return b"text 3" in self.render(messages).text
        except PromptError:
            return False

    def with_one_system(self, messages: Sequence[Message]) -> list[Message]:
        """Return a conversation with one system message at its beginning, as most templates require.

        Later ones stay where they are if the template accepts that; otherwise they join the first.
        """
        n = next((i for i, each in enumerate(messages) if each.role != "system"), len(messages))
        first, rest = list(messages[:n]), list(messages[n:])
        later = [each for each in rest if each.role == "system"]
        if later and not self.takes_later_system:
            first, rest = first + later, [each for each in rest if each.role != "system"]
        if not first:
            return rest
        return [replace(first[0], text="\n\n".join(each.text for each in first if each.text)), *rest]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Json]] | None = None,
        *,
        template_kwargs: Mapping[str, Json] | None = None,
        parse_special: bool = False,
    ) -> Rendered:
        """Render the conversation, up to where the assistant's answer begins.

        Only the template can write control tokens, and with `parse_special` messages, too. Tools are in
        OpenAI's form, {"type": "function", "function": {…}}. `template_kwargs` are more variables for the
        template, such as {"enable_thinking": False}.

        PromptError if these replace a reserved variable; TemplateError if the template takes too long or
        refuses, as many do if user and assistant do not alternate.
        """
        kwargs = template_kwargs or {}
        if taken := RESERVED.intersection(kwargs):
            raise PromptError(f"the template gets {', '.join(sorted(taken))} from llamaspec; leave that out")
        special = SpecialTokens(()) if parse_special else self._special
        said = conversation(messages)
        try:
            return self._rendered(said, tools, kwargs, special)
        except TemplateError as error:
            in_text = conversation(messages, arguments_in_text=True)  # as some templates expect them
            if in_text != said and not isinstance(error, TemplateTimeError):
                with suppress(TemplateError):
                    return self._rendered(in_text, tools, kwargs, special)
            raise

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]] | None,
        kwargs: Mapping[str, Json],
        special: SpecialTokens,
    ) -> Rendered:
        """As `render`."""
        try:
            escaper = Escaper(special, texts_in([self.source, messages, tools, kwargs]))
            # Templates are written for plain dictionaries and lists.
            variables = {
                **{key: escaper.escape_json(value) for key, value in kwargs.items()},
                "messages": [
                    {**escaper.escape_json(message), "role": message["role"]} for message in messages
                ],
                "tools": escaper.escape_json(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": True,
                **self._ends,
            }
            rendered = Rendered.of(PROCESS.render(self.source, variables), self._special, escaper)
        except (RenderError, ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            refused = f"the model's chat template refuses: {reason}"
            if messages and messages[0]["role"] == "system" and "system" in reason.lower():
                raise SystemPromptError(f"{refused}; leave the system prompt out") from error
            kind = TemplateTimeError if isinstance(error, RenderTimeError) else TemplateError
            raise kind(f"{refused}; give another template") from error
        if not rendered.text:
            raise TemplateError("the prompt is empty: the chat template writes nothing; give another one")
        return rendered

    def refused_place(self, messages: Sequence[Message], error: TemplateError, **more: Any) -> str:
        """Return the place of the message at which `render` fails; "" if it is none of them, or unknown.

        `more` are the other arguments of `render`.
        """
        if isinstance(error, TemplateTimeError) or self._refuses((), error, **more):
            return ""
        accepted = bisect_left(
            range(1, len(messages)), True, key=lambda n: self._refuses(messages[:n], error, **more)
        )
        return messages[accepted].place

    def _refuses(self, messages: Sequence[Message], error: TemplateError, **more: Any) -> bool:
        """Whether rendering fails with the same error."""
        try:
            self.render(messages, **more)
        except TemplateError as other:
            return str(other) == str(error)
        return False


def in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Json]]) -> list[Message]:
    """Return a conversation for a template without tools: its first message lists them, calls are text."""
    found: list[Message] = []
    before = ""  # role
    for message in messages:
        functions = [_call_as_dict(call)["function"] for call in message.tool_calls]
        calls = [json.dumps(function, ensure_ascii=False) for function in functions]
        text = "\n".join(filter(None, (message.text, *calls)))
        role = "user" if message.role == "tool" else message.role
        if "tool" in (message.role, before) and found and found[-1].role == role == "user":
            found[-1] = replace(found[-1], text=f"{found[-1].text}\n\n{text}")
        else:
            name = None if message.role == "tool" else message.name
            found.append(Message(role, text, name, reasoning=message.reasoning, place=message.place))
        before = message.role
    if tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        told = f'Call a tool: answer with JSON, {{"name": …, "arguments": {{…}}}}. The tools are:\n{listed}'
        found[0] = replace(found[0], text=f"{told}\n\n{found[0].text}")
    return found


def conversation(messages: Sequence[Message], *, arguments_in_text: bool = False) -> list[dict[str, Json]]:
    """Return messages as in OpenAI's API, but with the arguments of calls as objects, for templates."""
    return [_as_dict(message, arguments_in_text) for message in messages]


def _as_dict(message: Message, arguments_in_text: bool) -> dict[str, Json]:
    found: dict[str, Json] = {"role": message.role, "content": message.text}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
        if not (message.text and message.tool_calls):  # gpt-oss accepts only one of both beside a call
            found["thinking"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [_call_as_dict(call, arguments_in_text) for call in message.tool_calls]
    return found


def _call_as_dict(call: ToolCall, arguments_in_text: bool = False) -> dict[str, Json]:
    arguments = call.arguments if arguments_in_text else _as_object(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _as_object(arguments: str) -> Mapping[str, Json]:
    """Return the arguments of a call as an object, because templates iterate over them.

    Arguments that were cut off are closed, so that their beginning is found in the KV cache. Text behind the
    object is left out. Anything but an object becomes a string in one.
    """
    try:
        found = from_json(arguments.strip() or "{}", allow_partial="trailing-strings")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
