"""Generate docs/commands.md from the commands' help, and the results in docs/benchmarks.md.

The results come from benchmarks/*.json, written by `llamaspec bench --share`, in the order of their names.
`scripts/draw_benchmarks.py` draws their pictures. `--check`, a part of `make check`, compares the pages and
writes nothing.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner

from llamaspec.cli.main import main as llamaspec
from llamaspec.errors import LlamaspecError
from llamaspec.measure.report import markdown, read_report

ROOT = Path(__file__).resolve().parent.parent
COMMANDS, BENCHMARKS = ROOT / "docs" / "commands.md", ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks"
BEGIN, END = "<!-- from benchmarks/*.json, by `make docs` -->\n", "<!-- end -->\n"
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,80}\.json")
WIDTH = 100  # columns, whatever the width of the terminal

HEAD = """\
# Commands

`make docs` writes this page from the commands' help. Edit the help, not this page.
"""


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a page is out of date.")
def write_command_docs(check: bool) -> None:
    """Write docs/commands.md, and the results in docs/benchmarks.md."""
    try:
        pages = {COMMANDS: page(), BENCHMARKS: with_results(BENCHMARKS.read_text(encoding="utf-8"))}
    except LlamaspecError as error:
        raise click.ClickException(str(error)) from error
    is_current = True
    for path, new in pages.items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if not check:
            path.write_text(new, encoding="utf-8")
        elif new != old:
            is_current = False
            lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
            sys.stderr.writelines(difflib.unified_diff(*lines, str(path), "generated"))
            click.echo(f"{path.name} is out of date; run: make docs", err=True)
    sys.exit(not is_current)


def with_results(text: str, folder: Path = RESULTS) -> str:
    """Return the page of benchmarks with the results of a folder between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise LlamaspecError(f"{BENCHMARKS.name} lacks the lines {BEGIN.strip()} and {END.strip()}; add them")
    sections = []
    for path in sorted(folder.glob("*.json")):
        if not FILE_NAME.fullmatch(path.name):
            raise LlamaspecError(f"{path.name!r} is no name for a result; use only a-z, 0-9, dots and dashes")
        report = read_report(path)
        picture = f"![Times as fast as {report.baseline_name}, by task](benchmarks/{path.stem}.svg)"
        sections.append(f"{markdown(report)}\n{picture}\n\nFrom `benchmarks/{path.name}`.\n\n")
    return f"{before}{BEGIN}\n{''.join(sections)}{END}{after}"


def page() -> str:
    """Return the page of commands."""
    sections = [
        f"## {' '.join(path)}\n\n```text\n{help_of(path)}```\n" for path in paths(llamaspec, ("llamaspec",))
    ]
    return "\n".join([HEAD, *sections])


def paths(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the path of a command and those of its visible subcommands, in the order of the help."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from paths(below, (*path, name))


def help_of(path: tuple[str, ...]) -> str:
    """Return the output of `path -h`, or of `path --help-all` if the command has it."""
    name, *arguments = path
    for option in ("-h", "--help-all"):
        result = CliRunner(env={"NO_COLOR": "1"}).invoke(
            llamaspec, [*arguments, option], prog_name=name, terminal_width=WIDTH
        )
        if "--help-all" not in result.output:
            break
    if result.exit_code != 0:
        raise RuntimeError(
            f"{' '.join(path)} -h exited {result.exit_code}: {result.output}"
        ) from result.exception
    return "".join(f"{line.rstrip()}\n" for line in result.output.splitlines())


if __name__ == "__main__":
    write_command_docs()
