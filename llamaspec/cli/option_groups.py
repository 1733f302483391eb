"""Option groups: shown together in the help, passed to the command as one argument."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isnan
from typing import Any, TypeVar, cast

import click

from llamaspec.cli.habits import translated
from llamaspec.hub import HUB

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Any], Any]  # click.option(...) or click.argument(...)

_MANY = 20  # options; the help of a command with more shows only the common ones
_COMMON = frozenset((  # names of parameters
    "option", "file", "chat", "system", "target", "draft", "pair", "n_ctx", "gpu_layers",
    "threads", "max_tokens", "temperature", "seed", "stats", "as_json", "show_drafts", "explain",
    "resume", "save", "load", "reasoning",
    "host", "port", "parallel", "api_keys", "alias",
    "names", "repeats", "llama_server", "share", "quick", "show", "forget",
))  # fmt: skip
_DETAILS = ("short", "full")  # of --stats
_HUB_OPTIONS = {"-hf": "target", "-hfr": "target", "-hfd": "draft", "-hfrd": "draft"}  # llama.cpp's
_SHOWS_ALL = "llamaspec.shows_all"  # key of a context's meta
_SECTIONS: dict[click.Parameter, str] = {}  # where the help shows an option


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups.

    If a command has many options, -h shows the common ones and --help-all shows all of them.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own parameters, and --help-all if it has many."""
        parameters = super().get_params(ctx)
        return [*parameters, _HELP_ALL] if self._has_many else parameters

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as usual, but keep --stats from taking the prompt as its value; read llama.cpp's names."""
        end = args.index("--") if "--" in args else len(args)
        names = {parameter.name for parameter in self.params}
        for i in range(end):
            if (name := _HUB_OPTIONS.get(args[i])) in names and i + 1 < end:
                args = [*args[:i], f"--{name}", f"{HUB}{args[i + 1].removeprefix(HUB)}", *args[i + 2 :]]
            if args[i] == "--stats" and args[i + 1 : i + 2] and args[i + 1] not in _DETAILS:
                args = [*args[:i], f"--stats={_DETAILS[0]}", *args[i + 1 :]]
        try:
            if "target" in names:
                args = translated(args, {name for each in self.params for name in each.opts})
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click names no command if a value is missing
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per group, and one for the other options."""
        shows_all = not self._has_many or _SHOWS_ALL in ctx.meta
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            title = _SECTIONS.get(parameter, "Other")
            is_shown = shows_all or title == "Other" or parameter.name in _COMMON
            if record is not None and is_shown and isinstance(parameter, click.Option):
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section("Options" if len(sections) == 1 else title):
                formatter.write_dl(records)

    @property
    def _has_many(self) -> bool:
        return len(self.params) > _MANY


class Group(click.Group):
    """A command with subcommands."""

    command_class = GroupedCommand


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_SHOWS_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
    help="Show all options and exit.",
)  # fmt: skip


def section(title: str, options: Sequence[Decorator]) -> Callable[[Command], Command]:
    """Add options to a command, shown under one title in its help."""

    def decorate(command: Command) -> Command:
        _add(command, options, title)
        return command

    return decorate


def option_group(
    name: str, make: Callable[..., Any], options: Sequence[Decorator]
) -> Callable[[Command], Command]:
    """Add a section of options; the command receives `make(**values)` as the argument `name`.

    A ValueError from `make` is reported as a usage error.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def grouped(**values: Any) -> Any:
            own = {option: values.pop(option) for option in names}
            with refusing_values():
                values[name] = make(**own)
            return command(**values)

        names = _add(grouped, options, name.capitalize())
        return cast(Command, grouped)

    return decorate


def _add(command: Callable[..., Any], options: Sequence[Decorator], title: str) -> list[str]:
    """Add options to a command under a title, and return the names of their parameters."""
    before = len(getattr(command, "__click_params__", ()))
    for option in reversed(options):
        option(command)
    added: list[click.Parameter] = cast(Any, command).__click_params__[before:]
    _SECTIONS.update(dict.fromkeys(added, title))
    return [str(parameter.name) for parameter in added]


@contextmanager
def refusing_values() -> Iterator[None]:
    """Report a ValueError as a usage error."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context()) from error


class _Ranged:
    """Mixin for click's range types whose error message says which numbers are allowed."""

    noun: str

    def convert(self: Any, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert an argument."""
        try:
            number = super().convert(value, param, ctx)  # type: ignore[misc]
            if not isnan(number):  # click's comparisons let NaN pass
                return number
        except click.BadParameter:
            pass
        if self.min is None or self.max is None:
            allowed = f"≥ {self.min:g}" if self.max is None else f"≤ {self.max:g}"
        else:
            allowed = f"from {self.min:g} to {self.max:g}"
        raise click.BadParameter(f"must be {self.noun} {allowed}", ctx, param)


class Integer(_Ranged, click.IntRange):
    """An integer in a range."""

    name, noun = "integer", "an integer"


class Number(_Ranged, click.FloatRange):
    """A number in a range."""

    name, noun = "number", "a number"
