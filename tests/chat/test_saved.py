"""Conversations as files that others may have made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from command import invoke, naming
from llamaspec import PromptError
from llamaspec.chat.session import ConversationFiles, load_conversation, save_conversation
from llamaspec.chat.template import Message
from llamaspec.errors import LlamaspecError

HELLO = Message("user", "hello")


def test_what_other_programs_add_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"role": "user", "content": "hello", "time": 3}]')
    assert load_conversation(tmp_path / "x.json") == (HELLO,)


@pytest.mark.parametrize("content", ["[" * 200_000, '[{"role": ' * 10_000, f'[{{"role": 1{5000 * "0"}}}]'])
def test_deep_and_huge_content_is_one_line(tmp_path: Path, models: list[Path], content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    answer = invoke("chat", *naming(models), "--load", path)
    assert answer.code == 1
    (line,) = answer.complaints
    assert "is no conversation" in line


def test_what_is_no_small_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path / "huge", tmp_path):
        with pytest.raises(PromptError, match="cannot read the conversation"):
            load_conversation(path)


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(LlamaspecError, match="cannot save"):
        save_conversation(tmp_path / "folder", [HELLO])
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_names_that_no_file_can_have() -> None:
    files = ConversationFiles()
    for name in ("a\0b", 300 * "a"):
        with pytest.raises(PromptError) as raised:
            files.load(name)
        assert "\0" not in str(raised.value)
        with pytest.raises(LlamaspecError):
            files.save(files.writable(name), [HELLO])
