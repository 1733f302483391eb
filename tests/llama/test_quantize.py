"""Copies by llama.cpp's quantizer: what is left if one fails, and whose draft a copy is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from llamaspec.errors import LlamaspecError
from llamaspec.files import file_identity
from llamaspec.llama import quantize
from llamaspec.llama.child import run_child
from llamaspec.llama.quantize import write_copy
from llamaspec.plan import DRAFT_FOR, made_drafts, made_path
from tiny_models import Recipe, write_llama


def test_an_interrupted_copy_leaves_nothing(
    target_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize, "run_child", lambda module, task: run_child(module, task, stop))
    with pytest.raises(KeyboardInterrupt):
        write_copy(target_file, tmp_path / "copy.gguf", file_type="Q8_0", threads=1)
    assert list(tmp_path.iterdir()) == []


def test_without_a_child_process_the_reason_is_one_line(
    target_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refused)
    with pytest.raises(LlamaspecError, match="cannot start a process: Resource temporarily"):
        write_copy(target_file, tmp_path / "copy.gguf")


def test_a_draft_belongs_to_one_target(target_file: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "target.gguf", Recipe(seed=9))
    write_copy(target_file, made_path(other, "x"), entries={DRAFT_FOR: file_identity(target_file)}, threads=1)
    assert made_drafts(other) == []
    write_copy(other, made_path(other, "y"), entries={DRAFT_FOR: file_identity(other)}, threads=1)
    assert made_drafts(other) == [made_path(other, "y")]
