"""Weights that are not numbers: a target names its file, a draft stops drafting, and doctor finds both."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from command import invoke, naming, said
from fuzz_gguf import put_together, take_apart
from llamaspec import ModelOptions, open_pair
from model_store import ModelStore
from serving import served
from tiny_models import Recipe

CPU = ModelOptions(threads=1)


@pytest.fixture
def bad(store: ModelStore, tmp_path: Path) -> Path:
    """A model whose last norm has a weight that is not a number."""
    parts, path = take_apart(store.path("llama", Recipe())), tmp_path / "bad.gguf"
    at = next(tensor.offset for tensor in parts.tensors if tensor.name == b"output_norm.weight")
    parts.data = parts.data[:at] + struct.pack("<f", float("nan")) + parts.data[at + 4 :]
    path.write_bytes(put_together(parts))
    return path


def test_a_target_names_its_file(bad: Path) -> None:
    answer = invoke("generate", "x", *naming([bad]))
    assert said(answer) == f"llamaspec: {bad} gives scores that are not numbers; download or convert it again"


def test_why_a_draft_fell_silent_is_told(target_file: Path, bad: Path) -> None:
    """By the command, in JSON, and by the server."""
    why = f"{bad} gives scores that are not numbers; download or convert it again"
    arguments = ["generate", "x", *naming([target_file, bad]), "-n", "5", "--draft-length", "2"]
    for detail in ("short", "full"):
        told = invoke(*arguments, "--stats", detail).stderr
        assert f"the draft model failed and is no longer used: {why}\n" in told
    assert invoke(*arguments, "--json").json["statistics"]["draft_fault"] == why
    with open_pair(target_file, bad, target_options=CPU, draft_options=CPU) as pair, served(pair) as server:
        body = {"prompt": "x", "max_tokens": 5}
        assert server.post("/v1/completions", body).json()["timings"]["draft_fault"] == why
        plain = {**body, "speculative": {"enabled": False}}
        assert server.post("/v1/completions", plain).json()["timings"]["draft_fault"] is None


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_doctor_finds_it(target_file: Path, bad: Path, role: str) -> None:
    models = [bad, target_file] if role == "target" else [target_file, bad]
    answer = invoke("doctor", *naming(models), "--json")
    assert answer.code == 1
    found = [finding for finding in answer.json["findings"] if finding["level"] == "problem"]
    assert [(finding["topic"], "not numbers" in finding["text"]) for finding in found] == [(role, True)]
