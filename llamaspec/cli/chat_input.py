"""Reading the messages of a chat: single lines, lines continued with a backslash, or quoted blocks.

A terminal has line editing and a history file; a pipe is read line by line.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click
from platformdirs import user_state_path

from llamaspec.cli.options import UTF_16, decoded, in_utf8

_MAX_HISTORY_LINES = 1000
_QUOTES = '"""'

ReadLine = Callable[[str], str]  # (prompt) -> a line without its newline; raises EOFError at the end


@dataclass(frozen=True, slots=True)
class Typed:
    """One message or command."""

    text: str
    is_command: bool


def read_typed(read_line: ReadLine) -> Typed:
    """Read the next message or command; EOFError at the end. Ctrl-C discards an unfinished block."""
    line = read_line("> ")
    if "\n" in line:  # several lines were pasted at once
        return Typed(line.rstrip("\n"), is_command=False)
    if not line.startswith(_QUOTES) and not line.endswith("\\"):
        return Typed(line, is_command=line.startswith("/"))
    try:
        more = _block(line, read_line) if line.startswith(_QUOTES) else _continued(line, read_line)
        return Typed("\n".join(more), is_command=False)
    except KeyboardInterrupt:
        click.echo(err=True)
        return Typed("", is_command=False)


def _next(read_line: ReadLine, at_end: str) -> str:
    try:
        return read_line("... ")
    except EOFError:
        return at_end


def _continued(line: str, read_line: ReadLine) -> Iterator[str]:
    """Yield lines up to the first that does not end with a backslash."""
    while line.endswith("\\"):
        yield line[:-1]
        line = _next(read_line, at_end="")
    if line:
        yield line


def _block(line: str, read_line: ReadLine) -> Iterator[str]:
    """Yield the lines of a block up to closing triple quotes or the end of the input."""
    line = line[len(_QUOTES) :] or _next(read_line, at_end=_QUOTES)
    while not line.endswith(_QUOTES):
        yield line
        line = _next(read_line, at_end=_QUOTES)
    if line != _QUOTES:
        yield line[: -len(_QUOTES)]


def terminal_line(prompt: str) -> str:
    """Read a line from the terminal."""
    if not sys.stdout.isatty():  # `input` would write the prompt there
        click.echo(prompt, nl=False, err=True)
        prompt = ""
    return decoded(input(prompt).encode("utf-8", errors="surrogateescape"), "the message")


def piped_lines() -> ReadLine:
    """Return a function that reads lines from a pipe or a file."""
    lines = _lines_of_stdin()

    def read_line(_prompt: str) -> str:
        line = next(lines, b"")
        if not line:
            raise EOFError
        return decoded(line.removesuffix(b"\n").removesuffix(b"\r"), "the message")

    return read_line


def _lines_of_stdin() -> Iterator[bytes]:
    """Yield lines as they arrive; those of a text in UTF-16 when it has ended."""
    if sys.stdin is None:
        return
    first = sys.stdin.buffer.readline()
    if first.startswith(UTF_16):
        yield from io.BytesIO(in_utf8(first + sys.stdin.buffer.read()))
    else:
        yield first
        yield from sys.stdin.buffer


@contextmanager
def line_editing() -> Iterator[None]:
    """Enable line editing and the history file, if Python has readline."""
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    path = history_path()
    with suppress(OSError):  # a chat works without its history
        readline.read_history_file(path)
    if "GNU" in (readline.__doc__ or "") and os.environ.get("TERM") != "dumb":
        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines arrive as one message
    readline.set_history_length(_MAX_HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # other users must not read it
            readline.write_history_file(path)


def history_path() -> Path:
    """Return the file with the lines typed in earlier chats."""
    return user_state_path("llamaspec") / "chat_history"
