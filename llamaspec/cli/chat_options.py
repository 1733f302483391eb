"""Options for conversations, which `chat` and `generate --chat` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from llamaspec.chat.template import ChatTemplate, Message
from llamaspec.chat.transcript import Transcript
from llamaspec.cli.option_groups import Command, Decorator, option_group
from llamaspec.cli.report import Detail, chosen_detail, statistics_options
from llamaspec.errors import PromptError
from llamaspec.pair import Pair
from llamaspec.values import TokenArray

_CHAT = click.option(
    "--chat", is_flag=True, help="Take the prompt as a message, and answer by the chat template."
)
_OPTIONS: tuple[Decorator, ...] = (
    click.option("--system", metavar="TEXT", help="The system prompt: how the model should behave."),
    click.option(
        "--chat-template", metavar="FILE", help="A Jinja template instead of the one in the target's file."
    ),
)

_LAST = "last"


class _LastOrSize(click.ParamType):  # type: ignore[type-arg]
    """The word for the last conversation, or a number of tokens."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == _LAST else click.INT.convert(value, param, ctx)


_FILE_OPTIONS: tuple[Decorator, ...] = (
    click.option("--save", metavar="FILE", help="Write the conversation to a new file after every answer."),
    click.option(
        "--load", metavar="FILE", help="Go on with a saved conversation; may be the file of --save."
    ),
    click.option(
        "--resume", is_flag=True, help="Go on with the conversation that was held last at a terminal."
    ),
    click.option(
        "-c",
        "last_or_size",
        type=_LastOrSize(),
        is_flag=False,
        flag_value=_LAST,
        multiple=True,
        metavar="[N]",
        help="Alone the same as --resume; with a number, --n-ctx.",
    ),
    click.option(
        "--keep/--no-keep",
        default=True,
        show_default=True,
        help="Keep the conversation for --resume, in the cache folder, readable by you alone.",
    ),
    *statistics_options(None, "Statistics after every answer"),
)
_REASONING_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--reasoning",
        type=click.Choice(["show", "hide", "off"]),
        default="show",
        show_default=True,
        help="What a model thinks before it answers goes to stderr, or nowhere; off asks it not to think.",
    ),
    click.option(
        "--reasoning-budget",
        type=click.IntRange(min=0),
        metavar="N",
        help="End thinking after this many tokens.",
    ),
)


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """What becomes of what a model thinks."""

    reasoning: str
    reasoning_budget: int | None

    @property
    def template_kwargs(self) -> dict[str, bool]:
        """What the chat template is told."""
        return {"enable_thinking": False} if self.reasoning == "off" else {}

    @property
    def budget(self) -> int | None:
        """Tokens of thinking; none for a model that thinks though it was asked not to."""
        return 0 if self.reasoning == "off" else self.reasoning_budget


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a text.

    Raises
    ------
    click.UsageError
        The system prompt is not UTF-8, or there is to be no conversation.
    """

    system: str | None
    chat_template: str | None
    chat: bool = True

    def __post_init__(self) -> None:
        if not self.chat and (self.system or self.chat_template):
            raise click.UsageError(
                "--system and --chat-template need --chat; without it the text is just continued",
                click.get_current_context(),
            )
        try:
            (self.system or "").encode()
        except UnicodeEncodeError as error:
            raise click.UsageError(
                "the system prompt is not UTF-8; convert it first", click.get_current_context()
            ) from error

    def read_template(self, pair: Pair) -> ChatTemplate:
        """The template that was asked for.

        Raises
        ------
        NoTemplateError
            The target has none.
        PromptError
            It cannot be read or is not valid.
        """
        if self.chat_template is None:
            return ChatTemplate.of(pair.target)
        path = Path(self.chat_template)
        try:
            return ChatTemplate.of(pair.target, path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PromptError(
                f"cannot read the chat template {path}: {error.strerror or error}; name a readable file"
            ) from error
        except UnicodeDecodeError as error:
            raise PromptError(f"the chat template {path} is not UTF-8; convert it first") from error

    def first_turn(self, pair: Pair, prompt: bytes, *, parse_special: bool) -> TokenArray:
        """Tokens of a conversation that begins with a prompt as the user's message."""
        try:
            message = Message("user", prompt.decode("utf-8"))
        except UnicodeDecodeError as error:
            byte = f"byte {error.start} is 0x{prompt[error.start]:02x}"
            raise PromptError(f"the prompt is not UTF-8: {byte}; convert it first") from error
        messages = [Message("system", self.system), message] if self.system else [message]
        rendered = self.read_template(pair).render(messages, parse_special=parse_special)
        return Transcript(pair.target.vocabulary).read(rendered)


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Where a conversation comes from and goes to, and what is told of it.

    Raises
    ------
    ValueError
        It comes from two places.
    """

    save: str | None
    load: str | None
    resume: bool
    keep: bool
    stats: Detail | None
    n_ctx: int | None = None  # of -c N

    def __post_init__(self) -> None:
        if self.resume and self.load is not None:
            raise ValueError("--resume and --load both name a conversation; drop one")


def _files(
    *,
    resume: bool,
    last_or_size: tuple[str | int, ...],
    stats: Detail | None,
    no_stats: bool,
    **given: Any,
) -> FileOptions:
    """From the command line, where -c has two meanings."""
    sizes = [size for size in last_or_size if isinstance(size, int)]
    return FileOptions(
        resume=resume or _LAST in last_or_size,
        n_ctx=sizes[-1] if sizes else None,
        stats=chosen_detail(stats, no_stats, None),
        **given,
    )


def chat_options(command: Command) -> Command:
    """Options of conversations; the command gets ChatOptions as `conversation`."""
    return option_group("conversation", ChatOptions, _OPTIONS)(command)


def optional_chat_options(command: Command) -> Command:
    """The same with --chat, without which there is no conversation."""
    return option_group("conversation", ChatOptions, (_CHAT, *_OPTIONS))(command)


def reasoning_options(command: Command) -> Command:
    """Options of `chat` alone; the command gets ReasoningOptions as `thinking`."""
    return option_group("thinking", ReasoningOptions, _REASONING_OPTIONS)(command)


def file_options(command: Command) -> Command:
    """Options of `chat` alone; the command gets FileOptions as `files`."""
    return option_group("files", _files, _FILE_OPTIONS)(command)
