"""Options shared by several commands: prompt, sampling, drafting, chat, statistics."""

from __future__ import annotations

import codecs
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from llamaspec.cli.option_groups import Command, Decorator, Integer, Number, option_group
from llamaspec.cli.output import Detail, say
from llamaspec.errors import PromptError
from llamaspec.llama.options import MAX_DRAFT
from llamaspec.llama.weights import Weights
from llamaspec.opening import Drafting
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE, RULES
from llamaspec.sampling.filters import Sampling
from llamaspec.values import TokenArray

UNLIMITED = 1 << 31  # tokens; every context ends sooner
HOT = 2.0  # temperatures above this are probably meant as something else
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # PowerShell begins what it writes with one of these


JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON on stdout.")


# The prompt


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The prompt as given on the command line; ValueError if it is given twice."""

    option: str | None
    file: str | None
    argument: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if [self.option, self.file, self.argument or None].count(None) < 2:
            raise ValueError("give the prompt once: as an argument, with --prompt or with --file")

    @property
    def is_named(self) -> bool:
        """Whether the command line gives a prompt."""
        return bool(self.argument) or self.option is not None or self.file is not None

    def read(self, default: str | None = None) -> bytes:
        """Return the prompt, as `in_utf8`; PromptError if it is empty or the file cannot be read.

        If the command line has none, return the default. If there is no default either, ask at a terminal or
        read stdin.
        """
        text = " ".join(self.argument) if self.argument else self.option
        if not self.is_named:
            text = default
        if self.file is not None and self.file != "-":
            prompt = read_input(Path(self.file), "prompt file")
        elif text is not None and text != "-":
            prompt = text.encode("utf-8", errors="surrogateescape")
        elif not self.is_named and sys.stdin is not None and sys.stdin.isatty():
            prompt = click.prompt("Prompt", err=True).encode("utf-8", errors="surrogateescape")
        else:
            prompt = in_utf8(sys.stdin.buffer.read()) if sys.stdin is not None else b""
        if not prompt:
            raise PromptError("the prompt is empty; give some text to continue")
        return prompt


def read_input(path: Path, kind: str, remedy: str = "name a readable file") -> bytes:
    """Read a text that the user named, as `in_utf8`; PromptError if that fails."""
    try:
        return in_utf8(path.read_bytes())
    except OSError as error:
        reason = error.strerror or error
        raise PromptError(f"cannot read the {kind} {path}: {reason}; {remedy}") from error


def in_utf8(content: bytes) -> bytes:
    """Return a text byte for byte, but without a byte order mark; UTF-16, if it has one, becomes UTF-8."""
    if content.startswith(UTF_16):
        with suppress(UnicodeDecodeError):
            return content.decode("utf-16").encode()
    return content.removeprefix(codecs.BOM_UTF8)


class _TextFile(click.ParamType):  # type: ignore[type-arg]
    """A text in a file, which becomes the value; it is read and checked before any model is loaded.

    If `is_text` accepts the argument, that is the text itself. Chat templates may be names of llama.cpp's.
    """

    name = "file"

    def __init__(self, kind: str, is_text: Callable[[str], bool] | None = None) -> None:
        self._kind, self._is_text = kind, is_text

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text; PromptError if the file cannot be read or the text is invalid."""
        from llamaspec.chat.builtin_templates import builtin_template  # what only few commands need
        from llamaspec.chat.template import check_template
        from llamaspec.sampling.constraint import check_grammar, check_json_schema

        text: str = value
        if self._kind == _TEMPLATE and (named := builtin_template(value)) is not None:
            return named
        if self._is_text is None or not self._is_text(value):
            remedy = "name a readable file" + ("" if self._is_text is None else ", or give the text itself")
            text = decoded(read_input(Path(value), self._kind, remedy), f"the {self._kind} {value}")
        checks = {"JSON schema": check_json_schema, "grammar": check_grammar, _TEMPLATE: check_template}
        checks[self._kind](text)
        return text


JSON_SCHEMA = _TextFile("JSON schema", lambda given: given.lstrip().startswith("{"))
GRAMMAR = _TextFile("grammar", lambda given: any(mark in given for mark in ("\n", "::=", ": ")))
_TEMPLATE = "chat template"
CHAT_TEMPLATE = _TextFile(_TEMPLATE)
CHAT_TEMPLATE_OPTION = click.option(
    "--chat-template", type=CHAT_TEMPLATE, metavar="FILE|NAME",
    help="Jinja chat template to use instead of the target's own, or the name of one of llama.cpp's, such as "
         "chatml.",
)  # fmt: skip


def decoded(content: bytes, what: str) -> str:
    """Decode UTF-8, as `in_utf8`; PromptError that names the content if it is something else."""
    try:
        return in_utf8(content).decode()
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{content[error.start]:02x}"
        raise PromptError(f"{what} is not UTF-8: {byte}; convert it first") from error


def prompt_options(help_text: str, *, with_argument: bool = False) -> Callable[[Command], Command]:
    """Add the options for the prompt; the command receives a PromptSource as `prompt`."""
    options = [
        click.option("--prompt", "-p", "option", metavar="TEXT", help=help_text),
        click.option("--file", "-f", metavar="PATH",
                     help="Read the prompt from a file, byte for byte; - is stdin. A byte order mark is left "
                          "out, and UTF-16 converted."),
    ]  # fmt: skip
    if with_argument:
        options.insert(0, click.argument("argument", metavar="[PROMPT]...", nargs=-1))
    return option_group("prompt", PromptSource, options)


# Sampling and drafting


class DraftLength(Integer):
    """A number of draft tokens, or "auto", which becomes None."""

    name, noun = "draft length", "auto or an integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert an argument."""
        return None if value == "auto" else super().convert(value, param, ctx)


class _OrOff(click.ParamType):  # type: ignore[type-arg]
    """A number type in which one value means off and becomes None."""

    def __init__(self, kind: Any, off: float) -> None:
        self.name, self._kind, self._off = kind.name, kind, off

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert an argument."""
        number = self._kind.convert(value, param, ctx)
        return None if number == self._off else number


class _Limit(click.ParamType):  # type: ignore[type-arg]
    """A number of tokens; -1 is no limit, as in llama.cpp."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert an argument."""
        return UNLIMITED if value == "-1" else Integer(min=1).convert(value, param, ctx)


def _limit(default: int, shown: str | bool, text: str) -> Decorator:
    return click.option("--max-tokens", "-n", type=_Limit(), default=default,
                        show_default=shown, help=f"{text}; -1 = no limit.")  # fmt: skip


def _seed(default: str) -> Decorator:
    return click.option(
        "--seed", type=int, help=f"Random seed: the same seed gives the same text. Default: {default}."
    )


_DRAFTING: tuple[Decorator, ...] = (
    click.option("--draft-length", "-k", type=DraftLength(0, MAX_DRAFT), default="auto", show_default=True,
                 metavar=f"auto|0-{MAX_DRAFT}",
                 help="Draft tokens per round; 0 = plain decoding, auto = as many as are fastest. For top-k "
                      "sampling, use --top-k."),
    click.option("--exact", is_flag=True,
                 help="Refuse to run if the bits of a result could depend on what ran before or runs at the "
                      "same time."),
)  # fmt: skip
_CHAIN: tuple[Decorator, ...] = (
    click.option("--temperature", "--temp", "-t", type=float, metavar="NUMBER", default=0.8,
                 show_default=True, help="0 = always the most probable token."),
    click.option("--top-k", type=_OrOff(Integer(min=0), 0), default=40, show_default=True,
                 help="Sample from the k most probable tokens; 0 = all."),
    click.option("--top-p", type=_OrOff(Number(0, 1), 1), default=0.95, show_default=True,
                 help="Sample from the most probable tokens that reach this total probability; 1 = all."),
    click.option("--min-p", type=_OrOff(Number(0, 1), 0), default=0.05, show_default=True,
                 help="Drop tokens below this fraction of the best token's probability; 0 = none."),
    click.option("--repeat-penalty", type=_OrOff(Number(min=0), 1),
                 help="Divide the scores of recent tokens by this; 1 = off."),
    click.option("--presence-penalty", type=_OrOff(click.FLOAT, 0), metavar="NUMBER",
                 help="Subtract this from the scores of recent tokens; 0 = off."),
    click.option("--frequency-penalty", type=_OrOff(click.FLOAT, 0), metavar="NUMBER",
                 help="Subtract this once per occurrence of a recent token; 0 = off."),
)  # fmt: skip
_RULE: tuple[Decorator, ...] = (
    click.option("--rule", type=click.Choice(list(RULES)), default=DEFAULT_RULE, show_default=True,
                 help="How draft tokens are accepted. Only coupled gives the same text for a seed with and "
                      "without a draft."),
    *_DRAFTING,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions(Drafting):
    """Sampling and drafting options."""

    sampling: Sampling
    max_tokens: int
    seed: int | None  # None = random
    rule: str

    def seed_or_random(self) -> int:
        """Return the seed, or a random one."""
        return secrets.randbits(32) if self.seed is None else self.seed


_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def _decoding(**given: Any) -> DecodingOptions:
    sampling = Sampling(**{name: given.pop(name) for name in _SAMPLING})
    if sampling.temperature > HOT:
        say(
            f"--temperature {sampling.temperature:g} makes the text almost random; for threads, use --threads"
        )
    seed = given.pop("seed")
    return DecodingOptions(sampling=sampling, seed=None if seed == -1 else seed, **given)


# The command receives DecodingOptions as `decoding`. By default, answers of a chat have no limit, and
# commands that measure have a fixed seed. Servers and benchmarks receive only Drafting, as `drafting`.
drafting_options = option_group("drafting", Drafting, _DRAFTING)
_LIMIT = _limit(256, True, "Stop after this many tokens")
_ANSWER_LIMIT = _limit(UNLIMITED, "the rest of the context", "Stop an answer after this many tokens")
_DECODING = (*_CHAIN, _seed("random, as with -1, and reported"), *_RULE)
decoding_options = option_group("decoding", _decoding, (_LIMIT, *_DECODING))
answer_decoding_options = option_group("decoding", _decoding, (_ANSWER_LIMIT, *_DECODING))
measured_decoding_options = option_group("decoding", _decoding, (_LIMIT, *_CHAIN, _seed("0"), *_RULE))


def with_setting(decoding: DecodingOptions, name: str, value: str) -> DecodingOptions:
    """Return the options with one value changed, parsed as on the command line; PromptError if invalid."""
    (field,) = settings_of(decoding, name)
    settable: Any = answer_decoding_options(lambda: None)
    option = next(option for option in settable.__click_params__ if option.name == field)
    try:
        changed = {field: option.type.convert(value, option, None)}
        if field not in _SAMPLING:
            return replace(decoding, **changed)
        return replace(decoding, sampling=replace(decoding.sampling, **changed))
    except (click.BadParameter, ValueError) as error:
        reason = error.message.rstrip(".") if isinstance(error, click.BadParameter) else str(error)
        raise PromptError(f"{name} cannot be {value}: {reason}; /set shows them") from error


def settings_of(decoding: DecodingOptions, name: str = "") -> dict[str, Any]:
    """Return the settings that `/set` can change, or the named one, PromptError if there is none.

    None = off, or a random seed.
    """
    chain = {field: getattr(decoding.sampling, field) for field in _SAMPLING}
    found = {**chain, "seed": decoding.seed, "max_tokens": decoding.max_tokens}
    field = name.lstrip("-").replace("-", "_")
    if field and field not in found:
        raise PromptError(f"there is no setting {name}; choose one of {', '.join(found).replace('_', '-')}")
    return {field: found[field]} if field else found


# Conversations


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Chat options; ValueError if they are not UTF-8, or need --chat."""

    system: str | None = None
    chat_template: str | None = None  # its source; None = the target's own
    chat: bool = True

    def __post_init__(self) -> None:
        if not self.chat and (self.system or self.chat_template is not None):
            raise ValueError("--system and --chat-template need --chat")
        try:
            (self.system or "").encode()
        except UnicodeEncodeError as error:
            raise ValueError("the system prompt is not UTF-8; convert it first") from error

    def first_turn(self, target: Weights, prompt: bytes, *, parse_special: bool) -> TokenArray:
        """Return the tokens of a conversation whose first user message is the prompt.

        NoTemplateError if neither the options nor the target's file have a template.
        """
        from llamaspec.chat.messages import Message
        from llamaspec.chat.prompt import render_prompt
        from llamaspec.chat.template import ChatTemplate

        message = Message("user", decoded(prompt, "the prompt"))
        messages = [Message("system", self.system), message] if self.system else [message]
        template = ChatTemplate.of(target, self.chat_template)
        return render_prompt(template, messages, parse_special=parse_special).tokenize(target.vocabulary)


def _optional_chat(*, chat: bool, chat_template: str | None, **given: Any) -> ChatOptions:
    """Make ChatOptions; without --chat, the template that the lists give for a model does not matter."""
    source = click.get_current_context().get_parameter_source("chat_template")
    if not chat and source is ParameterSource.DEFAULT_MAP:
        chat_template = None
    return ChatOptions(chat=chat, chat_template=chat_template, **given)


_CHAT: tuple[Decorator, ...] = (
    click.option("--system", metavar="TEXT", help="System prompt."),
    CHAT_TEMPLATE_OPTION,
)
_WHETHER = click.option(
    "--chat", is_flag=True, help="Treat the prompt as a chat message, using the chat template."
)
# The command receives ChatOptions as `conversation`.
chat_options = option_group("conversation", ChatOptions, _CHAT)
optional_chat_options = option_group("conversation", _optional_chat, (_WHETHER, *_CHAT))


# Statistics


def statistics_options(default: Detail | None, help_text: str) -> tuple[Decorator, ...]:
    """--stats and --no-stats, as `stats` and `no_stats`; see `chosen_detail`."""
    shown = "none" if default is None else default
    return (
        click.option(
            "--stats", type=click.Choice(["short", "full"]), is_flag=False, flag_value="short",
            metavar="[short|full]", help=f"{help_text}; --stats alone: short. Default: {shown}."
        ),
        click.option("--no-stats", is_flag=True, help="No statistics."),
    )  # fmt: skip


def chosen_detail(stats: Detail | None, no_stats: bool, default: Detail | None) -> Detail | None:
    """Return the detail of the statistics; None = no statistics. ValueError for both options."""
    if stats is not None and no_stats:
        raise ValueError("--stats and --no-stats contradict each other; drop one")
    return None if no_stats else stats or default
