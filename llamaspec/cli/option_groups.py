"""Options in groups, each of which reaches a command as one typed value instead of as many arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import click

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Any], Any]  # click.option(...) or click.argument(...)


_TITLES = {"source": "Prompt", "thinking": "Reasoning", "options": "Server"}
_SECTIONS: dict[click.Parameter, str] = {}  # where the help shows an option


class GroupedCommand(click.Command):
    """A command whose help shows its options in the groups in which they were given to it."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section for each group, and one for what is in none."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(_SECTIONS.get(parameter, "Other"), []).append(record)
        for title, records in sections.items():
            with formatter.section("Options" if len(sections) == 1 else title):
                formatter.write_dl(records)


def option_group(
    name: str, make: Callable[..., Any], options: Sequence[Decorator]
) -> Callable[[Command], Command]:
    """Add options to a command, and hand it what `make` makes of them as the argument `name`.

    A ValueError of `make` is the user's fault, and is shown as one.
    """

    def decorate(command: Command) -> Command:
        before = len(getattr(command, "__click_params__", ()))

        @functools.wraps(command)
        def grouped(**values: Any) -> Any:
            own = {option: values.pop(option) for option in names}
            with refusing_values():
                values[name] = make(**own)
            return command(**values)

        for option in reversed(options):
            grouped = option(grouped)
        parameters = cast(Any, grouped).__click_params__[before:]
        names = [parameter.name for parameter in parameters]
        _SECTIONS.update(dict.fromkeys(parameters, _TITLES.get(name, name.capitalize())))
        return cast(Command, grouped)

    return decorate


@contextmanager
def refusing_values() -> Iterator[None]:
    """Show a ValueError as a fault of the command line: only where options are turned into values."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context()) from error
