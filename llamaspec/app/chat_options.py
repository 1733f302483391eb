"""Options for conversations, which `chat` and `generate --chat` share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llamaspec.app.options import Command
from llamaspec.app.pair import Pair
from llamaspec.errors import PromptError
from llamaspec.llama.template import ChatTemplate
from llamaspec.values import Message, TokenArray


def chat_options(command: Command) -> Command:
    """Options that say how a conversation becomes a text."""
    command = click.option(
        "--chat-template", metavar="FILE", help="A Jinja template instead of the one in the target's file."
    )(command)
    return click.option("--system", metavar="TEXT", help="The system prompt: how the model should behave.")(
        command
    )


def template_from(pair: Pair, options: dict[str, Any]) -> ChatTemplate:
    """The template that a command was asked for.

    Raises
    ------
    ModelFileError
        The target has none.
    PromptError
        It cannot be read or is not valid.
    """
    if options["chat_template"] is None:
        return ChatTemplate.of(pair.target)
    path = Path(options["chat_template"])
    try:
        return ChatTemplate.of(pair.target, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PromptError(
            f"cannot read the chat template {path}: {error.strerror or error}; name a readable file"
        ) from error
    except UnicodeDecodeError as error:
        raise PromptError(f"the chat template {path} is not UTF-8; convert it first") from error


def first_turn(pair: Pair, prompt: bytes, options: dict[str, Any]) -> TokenArray:
    """Tokens of a conversation that begins with a prompt as the user's message."""
    try:
        message = Message("user", prompt.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PromptError(
            f"the prompt is not UTF-8: byte {error.start} is 0x{prompt[error.start]:02x}; convert it first"
        ) from error
    system = system_from(options)
    messages = [Message("system", system), message] if system else [message]
    rendered = template_from(pair, options).render(messages)
    return pair.target.vocabulary.tokenize_rendered(rendered.encode())


def system_from(options: dict[str, Any]) -> str | None:
    """The system prompt that a command was asked for.

    Raises
    ------
    PromptError
        It is not UTF-8.
    """
    text: str | None = options["system"]
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise PromptError("the system prompt is not UTF-8; convert it first") from error
    return text
