"""Conversations in files: saved and loaded by name, and the last one in the cache folder.

A file is a JSON list of messages with `role` and `content`, as in other chat programs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llamaspec.chat.messages import Message
from llamaspec.errors import LlamaspecError, PromptError, printable
from llamaspec.files import cache_folder, parse_json, read_file, write_file

_MAX_BYTES = 64 << 20  # of a file
_LAST = "last_chat.json"  # the last conversation, in the cache folder


@dataclass(frozen=True, slots=True)
class _Saved:
    """A message in a file; other fields are ignored."""

    role: str
    content: str


def save_conversation(path: Path, messages: Sequence[Message], *, private: bool = False) -> None:
    """Write a conversation, in place of an existing file; LlamaspecError if that fails.

    Only the user can read a new or a private file.
    """
    content = [{"role": message.role, "content": message.text} for message in messages]
    try:
        write_file(
            path,
            json.dumps(content, ensure_ascii=False, indent=1) + "\n",
            private=private or not path.exists(),
        )
    except OSError as error:
        raise LlamaspecError(
            f"cannot save the conversation to {printable(str(path))}: {error.strerror or error}; "
            "name a writable file"
        ) from error


def load_conversation(path: Path) -> tuple[Message, ...]:
    """Read a conversation; PromptError if the file cannot be read or is not a conversation."""
    shown = printable(str(path))
    try:
        saved = parse_json(list[_Saved], read_file(path, _MAX_BYTES), unknown="ignore")
        return tuple(Message(message.role, message.content) for message in saved)
    except OSError as error:
        raise PromptError(
            f"cannot read the conversation {shown}: {error.strerror or error}; name a readable file"
        ) from error
    except ValueError as error:  # not UTF-8, not JSON, not messages
        raise PromptError(
            f'{shown} is not a conversation; give a file that /save wrote: a list of {{"role", "content"}}'
        ) from error


class ConversationFiles:
    """The files of one chat, which overwrites only files that it has read or written."""

    def __init__(self) -> None:
        self._own: set[str] = set()

    def load(self, name: str) -> tuple[Message, ...]:
        """As `load_conversation`."""
        messages = load_conversation(Path(name))
        self._own.add(os.path.realpath(name))
        return messages

    def writable(self, name: str) -> Path:
        """Return the path of a file to write; PromptError if it is not the chat's, or has no folder."""
        path, shown = Path(name), printable(name)
        try:
            path.lstat()
        except FileNotFoundError:
            if not path.parent.is_dir():
                folder = printable(str(path.parent))
                raise PromptError(f"there is no folder {folder}; create it first") from None
        except (OSError, ValueError) as error:  # too long, inside a file, or with a null character
            raise PromptError(f"no file can be called {shown}; choose another name") from error
        else:
            if os.path.realpath(path) not in self._own:
                raise PromptError(
                    f"{shown} exists and is not a file of this chat; delete it or name another file"
                )
        return path

    def save(self, path: Path, messages: Sequence[Message]) -> None:
        """As `save_conversation`."""
        save_conversation(path, messages)
        self._own.add(os.path.realpath(path))


def keep_last(messages: Sequence[Message]) -> None:
    """Keep a conversation as the last one, readable only for the user; LlamaspecError if that fails."""
    path = cache_folder() / _LAST
    with suppress(OSError):  # writing fails with the reason
        path.parent.mkdir(parents=True, exist_ok=True)
    save_conversation(path, messages, private=True)


def load_last() -> tuple[Message, ...]:
    """Return the last conversation; PromptError if there is none, or its file is damaged."""
    path = cache_folder() / _LAST
    with suppress(OSError):  # reading fails with the reason
        if not path.exists():
            raise PromptError("there is no last conversation to resume; start one, or load one from a file")
    return load_conversation(path)
