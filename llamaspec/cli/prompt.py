"""Where the prompt comes from: an argument, an option, a file, a pipe, or the person at the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from llamaspec.cli.option_groups import Command, option_group
from llamaspec.errors import PromptError


@dataclass(frozen=True, slots=True)
class PromptSource:
    """What the command line says about the prompt.

    Raises
    ------
    click.UsageError
        It names more than one source.
    """

    option: str | None
    file: str | None
    argument: str | None = None

    def __post_init__(self) -> None:
        if len([source for source in (self.argument, self.option, self.file) if source is not None]) > 1:
            raise click.UsageError(
                "give the prompt once: as an argument, with --prompt or with --file",
                click.get_current_context(),
            )

    def read(self, default: str | None = None) -> bytes:
        """The prompt as bytes, taken as they are.

        Parameters
        ----------
        default : str, optional
            Where nothing is named; without one a pipe is read, or the person is asked.

        Raises
        ------
        PromptError
            It is empty, or the file cannot be read.
        """
        text = self.argument if self.argument is not None else self.option
        if text is None and self.file is None and default is not None:
            return default.encode()
        prompt = _read(text, self.file)
        if not prompt:
            raise PromptError("the prompt is empty; give some text to continue")
        return prompt


def prompt_options(help_text: str, *, with_argument: bool = False) -> Callable[[Command], Command]:
    """Options that name the prompt; the command gets a PromptSource as `source`."""
    options = [
        click.option("--prompt", "-p", "option", metavar="TEXT", help=help_text),
        click.option(
            "--file", "-f", metavar="PATH", help="Read the prompt from a file, byte for byte; - is stdin."
        ),
    ]
    if with_argument:
        options.insert(0, click.argument("argument", metavar="[PROMPT]...", nargs=-1))
    return option_group("source", _source, options)


def _source(*, option: str | None, file: str | None, argument: tuple[str, ...] = ()) -> PromptSource:
    """From the command line, where several words are one prompt."""
    return PromptSource(option, file, " ".join(argument) if argument else None)


def _read(text: str | None, file: str | None) -> bytes:
    if file is not None and file != "-":
        try:
            return Path(file).read_bytes()
        except OSError as error:
            raise PromptError(
                f"cannot read the prompt file {file}: {error.strerror or error}; name a readable file"
            ) from error
    if text is not None and text != "-":
        return text.encode("utf-8", errors="surrogateescape")
    if file is None and text is None and sys.stdin is not None and sys.stdin.isatty():
        answer: str = click.prompt("Prompt", err=True)
        return answer.encode("utf-8", errors="surrogateescape")
    return sys.stdin.buffer.read() if sys.stdin is not None else b""
