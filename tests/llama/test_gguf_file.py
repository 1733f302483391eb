"""Reading GGUF files, sound or damaged; metadata that no sound file has."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import gguf
import pytest

from llamaspec.errors import ModelFileError
from llamaspec.llama.gguf_file import GgufFile, TensorFacts, check_metadata, kv_row_sizes, read_gguf
from model_store import ModelStore

UINT8, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, FLOAT64 = 0, 4, 5, 6, 7, 8, 9, 12
LONG = struct.pack("<Q", 1 << 40)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key.encode()) + struct.pack("<I", kind) + value


def array(kind: int, n: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, n) + values


def whole(key: str, value: int) -> bytes:
    return entry(key, INT32, struct.pack("<i", value))


def tokens(*spellings: bytes) -> bytes:
    return entry(
        "tokenizer.ggml.tokens", ARRAY, array(STRING, len(spellings), b"".join(map(text, spellings)))
    )


LLAMA = entry("general.architecture", STRING, text(b"llama"))


def check(folder: Path, *entries: bytes) -> None:
    path = folder / "model.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(entries)) + b"".join(entries))
    check_metadata(path)


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([LLAMA, whole("llama.block_count", 0)], "llama.block_count is 0, not from 1 to 4096"),
        ([LLAMA, whole("llama.block_count", 4097)], "llama.block_count is 4097, not from 1 to 4096"),
        ([LLAMA, whole("llama.vocab_size", 1)], "llama.vocab_size is 1, not from 2 to 268435456"),
        ([LLAMA, whole("llama.context_length", 0)], "llama.context_length is 0, not from 1 to 1073741824"),
        ([LLAMA, whole("llama.expert_used_count", 3), whole("llama.expert_count", 2)],
         "it uses 3 of 2 experts"),
        ([entry("a.epsilon", FLOAT32, struct.pack("<f", math.nan))], "a.epsilon is nan"),
        ([entry("a.epsilon", FLOAT64, struct.pack("<d", math.inf))], "a.epsilon is inf"),
        ([whole("general.alignment", 4)], "general.alignment is 4"),
        ([whole("general.alignment", 24)], "general.alignment is 24"),
        ([tokens(b"a", b"b", b"a", b"b", b"c")], "2 of its 5 tokens are duplicates"),
        ([tokens(b"a")], "its vocabulary has 1 tokens"),
        # After arrays of other types:
        ([entry("x", ARRAY, array(UINT32, 3, bytes(12))), whole("general.alignment", 1)], "alignment is 1"),
        ([entry("x", ARRAY, array(STRING, 2, text(b"a") + text(b"bc"))), whole("general.alignment", 1)],
         "alignment is 1"),
    ],
)  # fmt: skip
def test_impossible_metadata_is_refused(tmp_path: Path, entries: list[bytes], fault: str) -> None:
    with pytest.raises(ModelFileError, match=rf"model.gguf is damaged: .*{fault}; download or convert"):
        check(tmp_path, *entries)


@pytest.mark.parametrize(
    "sound",
    [
        [LLAMA, whole("llama.block_count", 1), whole("llama.vocab_size", 2)],
        [LLAMA, whole("llama.block_count", 4096)],
        [LLAMA, whole("other.block_count", 0)],  # of another architecture
        [LLAMA, whole("llama.expert_used_count", 2), whole("llama.expert_count", 2)],
        [whole("general.alignment", 8), tokens(b"a", b"b")],
        [LLAMA, entry("llama.block_count", BOOL, b"\0")],  # not a number
    ],
)
def test_possible_metadata_is_accepted(tmp_path: Path, sound: list[bytes]) -> None:
    check(tmp_path, *sound)


@pytest.mark.parametrize(
    "broken",
    [
        entry("x", 99, b""),  # a type that does not exist
        entry("x", ARRAY, array(ARRAY, 1, array(UINT8, 1, b"x"))),
        entry("x", ARRAY, array(UINT32, 1 << 40, b"")),  # more values than the file has bytes
        entry("x", ARRAY, array(STRING, 1 << 40, b"")),
        entry("x", STRING, LONG),
        entry("x", STRING, struct.pack("<Q", 4) + b"abc"),
        entry("x", UINT32, b"\0"),
        LONG,
        b"",
    ],
)
def test_metadata_that_cannot_be_read_is_left_to_llama_cpp(tmp_path: Path, broken: bytes) -> None:
    check(tmp_path, whole("general.alignment", 3), broken)


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma4-assistant"])
def test_it_agrees_with_the_gguf_package(store: ModelStore, kind: str) -> None:
    path = store.path(kind)
    found, reader = read_gguf(path), gguf.GGUFReader(path)
    assert found.tensors == {
        tensor.name: TensorFacts(
            tuple(tensor.shape.tolist()), int(tensor.tensor_type), tensor.data_offset - reader.data_offset
        )
        for tensor in reader.tensors
    }
    assert found.data_start == reader.data_offset
    assert found.architecture == kind
    assert found.number("block_count") == reader.fields[f"{kind}.block_count"].contents()


def test_damaged_files_are_read_up_to_the_damage(store: ModelStore, tmp_path: Path) -> None:
    """Random bytes at random lengths raise no error and take little time."""
    sound, chance = store.path("qwen35").read_bytes()[:20_000], random.Random(0)
    path = tmp_path / "damaged.gguf"
    for _ in range(300):
        content = bytearray(sound[: chance.randrange(len(sound))])
        for _ in range(chance.randrange(4) if content else 0):
            content[chance.randrange(len(content))] = chance.choice((0, 1, 127, 255))
        path.write_bytes(content)
        assert len(read_gguf(path).tensors) <= 100


QWEN3 = {
    "block_count": 28, "embedding_length": 1024,
    "attention.head_count": 16, "attention.head_count_kv": 8,
    "attention.key_length": 128, "attention.value_length": 128,
}  # fmt: skip
GEMMA4 = {
    "block_count": 6, "embedding_length": 2560, "attention.shared_kv_layers": 2,
    "attention.head_count": 8, "attention.head_count_kv": [2, 2, 1, 2, 2, 1],
    "attention.key_length": 512, "attention.value_length": 512,
    "attention.key_length_swa": 256, "attention.value_length_swa": 256,
    "attention.sliding_window_pattern": [1, 1, 0, 1, 1, 0],
}  # fmt: skip
DEEPSEEK = {
    "block_count": 62, "nextn_predict_layers": 1, "embedding_length": 7168,
    "attention.head_count": 128, "attention.head_count_kv": 1, "attention.kv_lora_rank": 512,
    "attention.key_length": 576, "attention.value_length": 512,
    "attention.key_length_mla": 192, "attention.value_length_mla": 128,
}  # fmt: skip
NEXT = {**QWEN3, "block_count": 8}


@pytest.mark.parametrize(
    ("architecture", "entries", "sizes"),
    [
        ("qwen3", QWEN3, [(1024, 1024)] * 28),  # 1024 / 16 for each of 8 heads would be 512
        ("llama", {"block_count": 2, "embedding_length": 64, "attention.head_count": 4}, [(64, 64)] * 2),
        ("gemma4", GEMMA4, [(512, 512), (512, 512), (512, 512), (512, 512), (0, 0), (0, 0)]),
        ("gemma4", {**GEMMA4, "attention.value_length": 64}, [(512, 512), (512, 512), (512, 64), (512, 512),
                                                              (0, 0), (0, 0)]),
        ("deepseek2", DEEPSEEK, [(576, 0)] * 61),
        ("deepseek32", {**DEEPSEEK, "attention.indexer.key_length": 128}, [(704, 0)] * 61),
        ("qwen3next", NEXT, 2 * [*[(0, 0)] * 3, (1024, 1024)]),
        ("qwen35", {**NEXT, "full_attention_interval": 2}, 4 * [(0, 0), (1024, 1024)]),
        ("qwen35", {**NEXT, "attention.recurrent_layers": [0, *[1] * 7]}, [(1024, 1024), *[(0, 0)] * 7]),
        ("falcon-h1", NEXT, [(1024, 1024)] * 8),  # each layer has attention and keeps a state
        ("llama", {}, [(0, 0)]),  # damaged
        ("llama", {**NEXT, "full_attention_interval": 0, "attention.head_count_kv": [3]}, [(2048, 2048)] * 8),
    ],
)  # fmt: skip
def test_what_each_layer_caches(
    architecture: str, entries: dict[str, int | list[int]], sizes: list[tuple[int, int]]
) -> None:
    """Once, all heads had the size of the model divided by the number of heads of the first layer.

    Those of Qwen3 0.6B are twice as large, so the check of memory saw half of what a context needs.
    """
    metadata = {f"{architecture}.{key}": value for key, value in entries.items()}
    assert kv_row_sizes(GgufFile({"general.architecture": architecture, **metadata})) == sizes


def test_arrays_of_numbers(tmp_path: Path) -> None:
    """Arrays with a number for each layer are kept; longer ones are left out."""
    path = tmp_path / "model.gguf"
    entries = [
        entry("whole", ARRAY, array(INT32, 2, struct.pack("<ii", 8, -1))),
        entry("true", ARRAY, array(BOOL, 3, b"\1\0\1")),
        entry("floats", ARRAY, array(FLOAT32, 1, struct.pack("<f", 0.5))),
        entry("long", ARRAY, array(UINT8, 5000, bytes(5000))),
    ]
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(entries)) + b"".join(entries))
    assert read_gguf(path).metadata == {"whole": [8, -1], "true": [True, False, True], "floats": [0.5]}
