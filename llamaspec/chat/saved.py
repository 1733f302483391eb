"""Conversations as files: a JSON list of {"role", "content"}, as chat programs exchange them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llamaspec.chat.message import Message
from llamaspec.errors import LlamaspecError, PromptError, printable
from llamaspec.files import parse_json, read_file, write_file

_MAX_BYTES = 64 << 20


class ConversationFiles:
    """The files of one chat; a file that it has neither read nor written is never overwritten."""

    def __init__(self) -> None:
        self._own: set[Path] = set()

    def load(self, name: str) -> tuple[Message, ...]:
        """Read a conversation.

        Raises
        ------
        PromptError
            The file cannot be read, or holds something else.
        """
        messages = load_conversation(Path(name))
        self._own.add(Path(os.path.realpath(name)))
        return messages

    def writable(self, name: str) -> Path:
        """The path of a file that may be written.

        Raises
        ------
        PromptError
            It is another file, or has no folder to lie in.
        """
        path = Path(name)
        shown = printable(name)
        try:
            path.lstat()
        except FileNotFoundError:
            if not path.parent.is_dir():
                folder = printable(str(path.parent))
                raise PromptError(
                    f"there is no folder {folder} for the conversation; make it first"
                ) from None
        except (OSError, ValueError) as error:  # too long, through a file, with a null character
            raise PromptError(f"no file can be called {shown}; name another") from error
        else:
            if Path(os.path.realpath(path)) not in self._own:
                raise PromptError(
                    f"{shown} exists and is not this conversation; remove it or name another file"
                )
        return path

    def save(self, path: Path, messages: Sequence[Message]) -> None:
        """Write a conversation.

        Raises
        ------
        LlamaspecError
            The file cannot be written.
        """
        save_conversation(path, messages)
        self._own.add(Path(os.path.realpath(path)))


def save_conversation(path: Path, messages: Sequence[Message]) -> None:
    """Write a conversation; a file that is there is replaced in one step, or not at all.

    Raises
    ------
    LlamaspecError
        The file cannot be written.
    """
    content = [asdict(_Saved(message.role, message.text)) for message in messages]
    try:
        write_file(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        raise LlamaspecError(
            f"cannot save the conversation to {printable(str(path))}: {error.strerror or error}; "
            "name a writable file"
        ) from error


def load_conversation(path: Path) -> tuple[Message, ...]:
    """Read a conversation.

    Raises
    ------
    PromptError
        The file cannot be read, or holds something else.
    """
    try:
        saved = parse_json(list[_Saved], read_file(path, _MAX_BYTES), unknown="ignore")
        return tuple(Message(message.role, message.content) for message in saved)
    except OSError as error:
        raise PromptError(
            f"cannot read the conversation {printable(str(path))}: {error.strerror or error}; "
            "name a readable file"
        ) from error
    except ValueError as error:  # not UTF-8, not JSON, not messages
        raise PromptError(
            f"{printable(str(path))} is no conversation: it should hold a JSON list of "
            '{"role", "content"}, as /save writes'
        ) from error


@dataclass(frozen=True, slots=True)
class _Saved:
    """A message as other programs write it; what else they say of it is left out."""

    role: str
    content: str
