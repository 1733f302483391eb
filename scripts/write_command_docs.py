"""Write docs/commands.md: the help of every command, as a person sees it.

The one idea: help is written once, at the options themselves. `--check` compares and writes nothing;
`make check` runs it.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner

from llamaspec.cli.main import main as llamaspec

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
WIDTH = 100  # columns; the terminal's own width would make the page depend on who wrote it

HEAD = """\
# Commands

Written by `make docs` from the commands' own help; edit the help, not this page.
"""


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if the page is out of step.")
def write_command_docs(check: bool) -> None:
    """Write docs/commands.md from the commands' help."""
    new = page()
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if not check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(new, encoding="utf-8")
    elif new != old:
        diff = difflib.unified_diff(
            old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            "docs/commands.md",
            "the commands' help",
        )
        sys.stderr.writelines(diff)
        click.echo("docs/commands.md is out of step with the commands; run: make docs", err=True)
        sys.exit(1)


def page() -> str:
    """The whole page."""
    sections = [
        f"## {' '.join(path)}\n\n```text\n{help_of(path)}```\n" for path in paths(llamaspec, ("llamaspec",))
    ]
    return "\n".join([HEAD, *sections])


def paths(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The command and all below it that are not hidden, in the order in which the help lists them."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from paths(below, (*path, name))


def help_of(path: tuple[str, ...]) -> str:
    """What `path --help` prints."""
    name, *arguments = path
    result = CliRunner(env={"NO_COLOR": "1"}).invoke(
        llamaspec, [*arguments, "-h"], prog_name=name, terminal_width=WIDTH
    )
    if result.exit_code != 0:
        raise RuntimeError(
            f"{' '.join(path)} -h exited {result.exit_code}: {result.output}"
        ) from result.exception
    return "".join(f"{line.rstrip()}\n" for line in result.output.splitlines())


if __name__ == "__main__":
    write_command_docs()
