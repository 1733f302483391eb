"""From a conversation to a prompt: the one way of the server, `llamaspec chat` and `chat_prompt`.

A prompt is rendered and tokenized from the messages alone, whatever tokens the model wrote before. So a text
depends only on the request and its seed, and a conversation that was saved and loaded goes on the same way.
A last message of the assistant is the beginning of the answer, which the model continues.
tests/chat/test_prompt.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from llamaspec.chat.messages import ROLES, Json, Message
from llamaspec.chat.template import ChatTemplate, Rendered
from llamaspec.errors import PromptError
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.pair import Pair
from llamaspec.values import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class RenderedPrompt:
    """A prompt, up to where the model continues."""

    rendered: Rendered
    is_thinking: bool  # the model continues with reasoning

    def tokenize(self, vocabulary: LlamaVocabulary) -> TokenArray:
        """Return the tokens: int32 [n]."""
        return vocabulary.begun(self.rendered.tokenize(vocabulary))


def render_prompt(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Json]] = (),
    *,
    template_kwargs: Mapping[str, Json] | None = None,
    parse_special: bool = False,
) -> RenderedPrompt:
    """Render a conversation and the beginning of its answer; otherwise as `ChatTemplate.render`."""
    rendered = template.render(
        asked(messages), tools, template_kwargs=template_kwargs, parse_special=parse_special
    )
    answer_format, answer = template.answer_format, begun_answer(messages)
    is_thinking = answer_format.begins_thinking(rendered.text)
    if answer.text or answer.reasoning:
        parts = answer_format.beginning(answer.text, answer.reasoning or "", rendered.text)
        for text, is_mark in parts:
            rendered = rendered.followed_by(text, parse_special=is_mark or parse_special)
        is_thinking = not answer.text and len(parts) > 1
    return RenderedPrompt(rendered, is_thinking)


def asked(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages before the answer. Templates need one that is not a system message."""
    n_begun = _n_begun(messages)
    before = messages[: len(messages) - n_begun]
    if not n_begun or any(message.role != "system" for message in before):
        return before
    return [*before, Message("user", "")]


def begun_answer(messages: Sequence[Message]) -> Message:
    """Return the beginning of the answer, which the model continues; may be empty."""
    begun = messages[len(messages) - _n_begun(messages) :]
    text = "\n\n".join(message.text for message in begun if message.text.strip())
    return Message("assistant", text, reasoning="".join(each.reasoning or "" for each in begun) or None)


def _n_begun(messages: Sequence[Message]) -> int:
    """Return how many messages at the end begin the answer."""
    is_begun = takewhile(lambda each: each.role == "assistant" and not each.tool_calls, reversed(messages))
    return len(list(is_begun))


def chat_prompt(
    pair: Pair,
    messages: Iterable[Message | Mapping[str, Any]],
    *,
    template: str | None = None,
    parse_special: bool = False,
) -> TokenArray:
    """Return the prompt of a conversation in the target's chat template, for `Pair.stream`: int32 [n].

    Parameters
    ----------
    messages : iterable of Message or of dict
        A dict has a role (system, user or assistant) and a content, as in OpenAI's API. The model continues
        a last message of the assistant.
    template : str, optional
        A Jinja template to use instead of the target's own.
    parse_special : bool
        Read control tokens in the messages as such, not as text.

    Raises
    ------
    NoTemplateError
        The target's file has no template.
    PromptError
        The template refuses the messages, or they are none.
    """
    given = [each if isinstance(each, Message) else _message(each) for each in messages]
    rendering = ChatTemplate.of(pair.target, template)
    return render_prompt(rendering, given, parse_special=parse_special).tokenize(pair.target.vocabulary)


def _message(given: Mapping[str, Any]) -> Message:
    role, content = given.get("role"), given.get("content")
    if role not in ROLES or not isinstance(content, str):
        raise PromptError(f"a message needs a role ({', '.join(ROLES)}) and a text as its content")
    return Message(role, content)
