"""Messages, and chat templates, which make a conversation the text that a model was trained to read.

A template is a Jinja program in a model's file. It runs in a sandboxed process (`chat/sandbox.py`), with the
words of users, tools and clients escaped (`chat/escaping.py`); whatever goes wrong in it becomes one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from llamaspec.chat.escaping import Escaper, Json, Rendered, SpecialTokens, texts_in
from llamaspec.chat.sandbox import PROCESS, RenderError
from llamaspec.errors import ModelFileError, PromptError
from llamaspec.llama.model import LlamaModel

KEY = "tokenizer.chat_template"
RESERVED = frozenset(  # what a template's own variables may not replace
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception",
     "strftime_now"}
)  # fmt: skip
ROLES = ("system", "user", "assistant", "tool")


class NoTemplateError(ModelFileError):
    """A model's file holds no chat template."""


class TemplateError(PromptError):
    """A chat template is not valid, or refuses a conversation."""


class SystemPromptError(TemplateError):
    """A chat template refuses the system prompt."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the assistant wants called."""

    id: str
    name: str
    arguments: str  # JSON, as the model wrote it: it may be wrong


@dataclass(frozen=True, slots=True)
class Message:
    """One contribution to a conversation; ValueError where the role is unknown."""

    role: str  # system, user, assistant or tool
    text: str
    name: str | None = None  # of the speaker, or of the tool whose result this is
    tool_calls: tuple[ToolCall, ...] = ()  # of the assistant
    tool_call_id: str | None = None  # the call whose result this is
    reasoning: str | None = None  # what the assistant thought before its answer

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"a message is from {', '.join(ROLES)}, got {self.role!r}")


class ChatTemplate:
    """Renders conversations for one model; TemplateError where the source is not valid Jinja.

    `bos` and `eos` are how the model spells the beginning and the end of a text, "" where it has no such
    token; `special` all its control tokens, by default these two.
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
        """The template in a model's file, or another for it; NoTemplateError where there is none."""
        if source is None:
            source = model.metadata(KEY)
        if source is None:
            raise NoTemplateError(
                f"{model.path} has no chat template: it was made to continue text, not to converse; choose "
                f"an instruction-tuned model, or give a template"
            )
        words = model.vocabulary
        ends = [words.text(i).decode(errors="replace") if i >= 0 else "" for i in (words.bos, words.eos)]
        return cls(source, ends[0], ends[1], SpecialTokens(words.controls))

    @property
    def takes_tools(self) -> bool:
        """Whether the template tells the model about tools; if not, it would not know of any."""
        return re.search(r"\btools\b", self.source) is not None

    @cached_property
    def takes_later_system(self) -> bool:
        """Whether a system message may follow others, and its text is rendered."""
        roles = ("system", "user", "assistant", "system", "user")
        messages = [Message(role, f"text {i}") for i, role in enumerate(roles)]
        try:
            return b"text 3" in self.render(messages).text
        except PromptError:
            return False

    def with_one_system(self, messages: Sequence[Message]) -> list[Message]:
        """A conversation in which one system message comes first, as most templates want it.

        Later ones stay where they are if the template takes them there; else they join the first.
        """
        n = next((i for i, each in enumerate(messages) if each.role != "system"), len(messages))
        first, rest = list(messages[:n]), list(messages[n:])
        later = [each for each in rest if each.role == "system"]
        if later and not self.takes_later_system:
            first, rest = first + later, [each for each in rest if each.role != "system"]
        if not first:
            return rest
        return [Message("system", "\n\n".join(each.text for each in first if each.text)), *rest]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Json]] | None = None,
        *,
        template_kwargs: Mapping[str, Json] | None = None,
        parse_special: bool = False,
    ) -> Rendered:
        """The conversation, up to where the assistant's next words begin.

        Nothing in it becomes a control token but what the template itself writes, and with `parse_special`
        what messages do. Tools are in OpenAI's form, {"type": "function", "function": {…}}.
        `template_kwargs` are more variables for the template, such as {"enable_thinking": False}.

        PromptError where these would replace what the template gets in any case; TemplateError where the
        template refuses, as many do if user and assistant do not take turns, or takes too long.
        """
        kwargs = template_kwargs or {}
        if taken := RESERVED.intersection(kwargs):
            raise PromptError(f"the template gets {', '.join(sorted(taken))} from llamaspec; leave that out")
        try:
            texts = texts_in([self.source, conversation(messages), tools, kwargs])
            escaper = Escaper(SpecialTokens(()) if parse_special else self._special, texts)
            # Plain dictionaries and lists are what templates are written for.
            variables = {
                **{key: escaper.escape_json(value) for key, value in kwargs.items()},
                "messages": [
                    {**escaper.escape_json(message), "role": message["role"]}
                    for message in conversation(messages)
                ],
                "tools": escaper.escape_json(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": True,
                **self._ends,
            }
            return Rendered.of(PROCESS.render(self.source, variables), self._special, escaper)
        except (RenderError, ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            refused = f"the model's chat template refuses: {reason}"
            if messages and messages[0].role == "system" and "system" in reason.lower():
                raise SystemPromptError(f"{refused}; leave the system prompt out") from error
            raise TemplateError(f"{refused}; give another template") from error


def conversation(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Messages as templates know them: as in OpenAI's API, but with arguments of calls as objects."""
    return [_as_dict(message) for message in messages]


def _as_dict(message: Message) -> dict[str, Json]:
    found: dict[str, Json] = {"role": message.role, "content": message.text}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
        if not (message.text and message.tool_calls):  # gpt-oss wants only one of both beside a call
            found["thinking"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [_call_as_dict(call) for call in message.tool_calls]
    return found


def _call_as_dict(call: ToolCall) -> dict[str, Json]:
    """With its arguments as an object; what a model wrote wrongly stays a text."""
    try:
        found = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    arguments = found if isinstance(found, dict) else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
