"""Conversations as files: a JSON list of {"role", "content"}, as chat programs exchange them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from llamaspec.errors import LlamaspecError, PromptError
from llamaspec.values import Message


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
        self._own.add(Path(name).resolve())
        return messages

    def writable(self, name: str) -> Path:
        """The path of a file that may be written.

        Raises
        ------
        PromptError
            It is another file, or has no folder to lie in.
        """
        path = Path(name)
        if path.exists() and path.resolve() not in self._own:
            raise PromptError(f"{path} exists and is not this conversation; remove it or name another file")
        if not path.parent.is_dir():
            raise PromptError(f"there is no folder {path.parent} for the conversation; make it first")
        return path

    def save(self, path: Path, messages: Sequence[Message]) -> None:
        """Write a conversation.

        Raises
        ------
        LlamaspecError
            The file cannot be written.
        """
        save_conversation(path, messages)
        self._own.add(path.resolve())


def save_conversation(path: Path, messages: Sequence[Message]) -> None:
    """Write a conversation; a file that is there is replaced in one step, or not at all.

    Raises
    ------
    LlamaspecError
        The file cannot be written.
    """
    content = [{"role": message.role, "content": message.text} for message in messages]
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        new.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise LlamaspecError(
            f"cannot save the conversation to {path}: {error.strerror or error}; name a writable file"
        ) from error


def load_conversation(path: Path) -> tuple[Message, ...]:
    """Read a conversation.

    Raises
    ------
    PromptError
        The file cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return tuple(_message(item) for item in content)
    except OSError as error:
        raise PromptError(
            f"cannot read the conversation {path}: {error.strerror or error}; name a readable file"
        ) from error
    except (ValueError, TypeError, KeyError) as error:  # not UTF-8, not JSON, not messages
        raise PromptError(
            f'{path} is no conversation: it should hold a JSON list of {{"role", "content"}}, as /save writes'
        ) from error


def _message(item: dict[str, str]) -> Message:
    role, text = item["role"], item["content"]
    if not isinstance(text, str):
        raise TypeError("a message is a text")
    text.encode()  # JSON can spell what UTF-8 cannot
    return Message(role, text)
