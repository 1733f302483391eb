"""Where the prompt comes from: an argument, an option, a file, a pipe, or the person at the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from llamaspec.errors import PromptError


def read_prompt(argument: str | None, option: str | None, file: str | None) -> bytes:
    """The prompt as bytes, taken as they are.

    Raises
    ------
    PromptError
        More than one source, none, an unreadable file, or an empty prompt.
    """
    given = [source for source in (argument, option, file) if source is not None]
    if len(given) > 1:
        raise PromptError("give the prompt once: as an argument, with --prompt or with --file")
    prompt = _read(argument if argument is not None else option, file)
    if not prompt:
        raise PromptError("the prompt is empty; give some text to continue")
    return prompt


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
