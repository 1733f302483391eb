"""What a person types, message by message: one line, several joined by backslashes, or a block of them.

At a terminal with line editing and a history that lasts; otherwise line by line from a pipe.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from platformdirs import user_state_path

from llamaspec.errors import PromptError

QUOTES = '"""'
HISTORY_LENGTH = 1000  # lines
MOST_HISTORY = 10 << 20  # bytes

ReadLine = Callable[[str], str]  # (prompt) -> a line without its end; EOFError when there are no more


@dataclass(frozen=True, slots=True)
class Typed:
    """One message or command."""

    text: str
    is_command: bool


def read_typed(read_line: ReadLine) -> Typed:
    """The next message or command. Ctrl-C within several lines takes them back and gives an empty one.

    Raises
    ------
    EOFError
        There is none.
    """
    line = read_line("> ")
    if "\n" in line:  # several lines were pasted at once
        return Typed(line.rstrip("\n"), is_command=False)
    if not line.startswith(QUOTES) and not line.endswith("\\"):
        return Typed(line, is_command=line.startswith("/"))
    try:
        more = _block(line, read_line) if line.startswith(QUOTES) else _continued(line, read_line)
        return Typed("\n".join(more), is_command=False)
    except KeyboardInterrupt:
        click.echo(err=True)
        return Typed("", is_command=False)


def _continued(line: str, read_line: ReadLine) -> Iterator[str]:
    """Lines up to the first without a backslash at its end."""
    while line.endswith("\\"):
        yield line[:-1]
        try:
            line = read_line("... ")
        except EOFError:
            return
    yield line


def _block(line: str, read_line: ReadLine) -> Iterator[str]:
    """Lines between triple quotes; text beside the quotes belongs to it."""
    line = line[len(QUOTES) :]
    if not line:  # the quotes stand alone
        line = _line_or_end(read_line)
    while not line.endswith(QUOTES):
        yield line
        line = _line_or_end(read_line)
    if line != QUOTES:
        yield line[: -len(QUOTES)]


def _line_or_end(read_line: ReadLine) -> str:
    """The next line; the end of all input ends a block, too."""
    try:
        return read_line("... ")
    except EOFError:
        return QUOTES


def at_terminal() -> bool:
    """Whether a person types."""
    return sys.stdin is not None and sys.stdin.isatty()


def terminal_line(prompt: str) -> str:
    """A line typed at the terminal."""
    if not sys.stdout.isatty():  # `input` would write the prompt there
        click.echo(prompt, nl=False, err=True)
        prompt = ""
    return _utf8(input(prompt).encode("utf-8", errors="surrogateescape"))


def piped_line(_prompt: str) -> str:
    """A line from a pipe or a file."""
    line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    if not line:
        raise EOFError
    return _utf8(line.removesuffix(b"\n").removesuffix(b"\r"))


def _utf8(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"the message is not UTF-8: byte {error.start} is 0x{line[error.start]:02x}; convert it first"
        ) from error


@contextmanager
def line_editing() -> Iterator[None]:
    """Editing and a history of lines, where Python has readline; the history is kept in the user's folder."""
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    path = history_path()
    is_kept = _is_small_or_missing(path)
    with contextlib.suppress(OSError):  # none yet, or not readable
        if is_kept:
            readline.read_history_file(path)
    if "GNU" in (readline.__doc__ or "") and os.environ.get("TERM") != "dumb":
        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines come as one
    readline.set_history_length(HISTORY_LENGTH)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # nobody should lose a chat because of its history
            if is_kept:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)  # what people type is their own
                readline.write_history_file(path)


def _is_small_or_missing(path: Path) -> bool:
    """Neither a pipe, which would keep a person waiting, nor a device or something huge."""
    try:
        facts = path.stat()
    except OSError:
        return True
    return stat.S_ISREG(facts.st_mode) and facts.st_size <= MOST_HISTORY


def history_path() -> Path:
    """The file with the lines typed in earlier chats."""
    return user_state_path("llamaspec") / "chat_history"
