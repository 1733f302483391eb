"""A GGUF file as Python reads it, sound or damaged."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import pytest

from llamaspec.llama.gguf_tensors import read_tensors
from model_store import ModelStore


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma4-assistant"])
def test_it_finds_what_the_gguf_package_finds(store: ModelStore, kind: str) -> None:
    path = store.path(kind)
    found, reader = read_tensors(path), gguf.GGUFReader(path)
    assert found.names == {tensor.name for tensor in reader.tensors}
    architecture = found.texts["general.architecture"]
    assert architecture == kind
    key = f"{architecture}.block_count"
    assert found.numbers[key] == reader.fields[key].contents()


def test_damaged_files_are_read_as_far_as_they_go(store: ModelStore, tmp_path: Path) -> None:
    """Any bytes and any length: no error, and nothing that takes long."""
    sound, chance = store.path("qwen35").read_bytes()[:20_000], random.Random(0)
    path = tmp_path / "damaged.gguf"
    for _ in range(300):
        content = bytearray(sound[: chance.randrange(len(sound))])
        for _ in range(chance.randrange(4) if content else 0):
            content[chance.randrange(len(content))] = chance.choice((0, 1, 127, 255))
        path.write_bytes(content)
        assert len(read_tensors(path).names) <= 100
