"""A draft model with fewer tokens: the kept ones have the same logits, and any text can be tokenized."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llamaspec import FixedLength, LlamaModel, ModelOptions, NoDrafter, Sampling, open_pair
from llamaspec.draft_making.trim import Tokenizer, Trimmed, trim_draft
from llamaspec.errors import LlamaspecError, PromptError
from llamaspec.files import file_identity
from llamaspec.llama.gguf_file import TOKENS, read_gguf
from llamaspec.plan import DRAFT_FOR, made_drafts, made_path
from model_store import ModelStore
from plain_llama import PlainLlama
from tiny_models import Recipe, truncated, write_gemma3, write_llama
from tiny_vocabulary import BYTES, sentencepiece_vocabulary

KEEP = 272  # of 288: 2 special tokens, 256 bytes and 14 others
OPTIONS = ModelOptions(threads=1, n_ctx=256, gpu_layers=0)
DRAFT = Recipe(dtype="q8_0").draft()
RECIPES = {
    "floats": replace(DRAFT, dtype="f32"),
    "q8_0": DRAFT,
    "q4_0": replace(DRAFT, dtype="q4_0"),
    "tied": replace(DRAFT, tied=True),
    "renumbered": replace(DRAFT, shuffled=4),
    "pieces": replace(DRAFT, vocabulary=sentencepiece_vocabulary()),
}
TEXT = b"the def self the ing " * 3


def tokens_of(path: Path) -> list[bytes]:
    found: list[bytes] = read_gguf(path, with_tokens=True).metadata[TOKENS]
    return found


def keep_of(name: str) -> int:
    """Return somewhat fewer tokens than a recipe has; pieces have letters and bytes of the same name."""
    return 360 if name == "pieces" else KEEP


def kept_of(path: Path, trimmed: Path) -> list[int]:
    """Return the ids in the original of a trimmed file's tokens."""
    places = {token: i for i, token in enumerate(tokens_of(path))}
    return [places[token] for token in tokens_of(trimmed)]


@pytest.mark.parametrize("name", RECIPES)
def test_logits_of_the_kept_tokens_are_the_same_bit_for_bit(
    store: ModelStore, tmp_path: Path, name: str
) -> None:
    path = store.path("llama", RECIPES[name])
    keep, output = keep_of(name), tmp_path / "trimmed.gguf"
    trimmed = trim_draft(path, output, (TEXT,), keep)
    kept = kept_of(path, output)
    assert trimmed == Trimmed(
        keep, len(tokens_of(path)), output.stat().st_size, path.stat().st_size, trimmed.of_text
    )
    assert kept == sorted(kept)
    assert list(tmp_path.iterdir()) == [output]
    text = np.random.default_rng(3).integers(0, keep, 40)
    with PlainLlama(path) as whole, PlainLlama(output) as less:
        expected = whole.logits([kept[token] for token in text])
        assert (less.logits(text.tolist()) == expected[:, kept]).all()


@pytest.mark.parametrize("name", ["renumbered", "pieces"])
def test_the_text_for_a_seed_is_the_same(store: ModelStore, tmp_path: Path, name: str) -> None:
    target = store.path("llama", Recipe(dtype="q8_0"))
    output = tmp_path / "trimmed.gguf"
    trim_draft(store.path("llama", RECIPES[name]), output, keep=keep_of(name))
    with open_pair(target, output, target_options=OPTIONS, draft_options=OPTIONS) as pair:
        for seed, temperature in enumerate((0.0, 0.8, 1.5)):
            wish: dict[str, Any] = {
                "sampling": Sampling(temperature=temperature), "seed": seed, "max_tokens": 40,
            }  # fmt: skip
            plain = pair.stream("the end", drafter=NoDrafter(), **wish).run()
            found = pair.stream("the end", policy=FixedLength(3), **wish).run()
            assert found.tokens == plain.tokens
            assert found.summary.n_drafted > 0


@pytest.mark.parametrize("name", ["q8_0", "renumbered", "pieces"])
def test_special_tokens_are_kept_and_any_text_can_be_tokenized(
    store: ModelStore, tmp_path: Path, name: str
) -> None:
    path, output = store.path("llama", RECIPES[name]), tmp_path / "trimmed.gguf"
    trim_draft(path, output, keep=keep_of(name))
    with LlamaModel(path, OPTIONS) as whole, LlamaModel(output, OPTIONS) as less:
        before, after = whole.vocabulary, less.vocabulary
        assert before.controls.keys() == after.controls.keys()
        assert (after.text(after.bos), after.text(after.eos)) == (
            before.text(before.bos),
            before.text(before.eos),
        )
        assert after.adds_bos == before.adds_bos
        for text in (TEXT, "Ünïcode ✓ \U0001f600\n\t\0".encode(), bytes(range(128))):
            found = after.tokenize(text, add_special=False)
            assert b"".join(map(after.piece, found.tolist())).removeprefix(b" ") == text.removeprefix(b" ")


def test_frequent_tokens_are_kept(store: ModelStore, tmp_path: Path) -> None:
    path, output = store.path("llama", DRAFT), tmp_path / "trimmed.gguf"
    text = "ing é".encode() * 9
    trimmed = trim_draft(path, output, (b"", text), 261)
    assert [token.decode() for token in tokens_of(output)[258:]] == ["in", "Ã©", "ing"]
    assert trimmed.of_text == 1.0
    with LlamaModel(path, OPTIONS) as whole, LlamaModel(output, OPTIONS) as less:
        both = [model.vocabulary.tokenize(text, add_special=False) for model in (whole, less)]
        assert len(both[0]) == len(both[1])
    assert trim_draft(path, tmp_path / "less.gguf", (b"the the the",), 259).of_text == 0.5


def test_a_token_is_kept_with_the_parts_that_it_is_merged_from() -> None:
    tokens = ("a", "b", "c", "ab", "abc", "<s>", "<pad>", "<unused7>", "de")
    tokenizer = Tokenizer(tokens, (1, 1, 1, 1, 1, 3, 5, 3, 1), ("a b", "ab c"), (6,))
    counts = np.array([0, 0, 0, 0, 9, 0, 0, 0, 8])
    assert [tokens[i] for i in tokenizer.kept(7, counts)] == ["a", "b", "c", "ab", "abc", "<s>", "<pad>"]
    kept = tokenizer.kept(6, counts)
    assert [tokens[i] for i in kept] == ["a", "b", "c", "<s>", "<pad>", "de"]  # no room for abc with ab
    assert tokenizer.merges_of(tokenizer.kept(7, counts)) == ["a b", "ab c"]
    assert tokenizer.merges_of(kept) == ["a b"]  # llama.cpp wants one
    for n in (4, 8):
        with pytest.raises(LlamaspecError, match=f"cannot keep {n} tokens: 8 are used, .* from 5 to 7"):
            tokenizer.kept(n, counts)


def test_other_tensors_and_metadata_are_the_same(tmp_path: Path) -> None:
    path = write_gemma3(tmp_path / "draft.gguf", replace(DRAFT, dtype="q4_0"))
    output = tmp_path / "trimmed.gguf"
    trim_draft(path, output, keep=KEEP)
    before, after = gguf.GGUFReader(path), gguf.GGUFReader(output)
    kept = kept_of(path, output)
    for old, new in itertools.zip_longest(before.tensors, after.tensors):
        assert (old.name, old.tensor_type) == (new.name, new.tensor_type)
        rows = kept if old.name in ("token_embd.weight", "output.weight") else slice(None)
        assert (old.data[rows] == new.data).all()
    changed = {
        name
        for name, field in before.fields.items()
        if not name.startswith("GGUF.") and field.contents() != after.fields[name].contents()
    }
    assert changed == {f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges")}


def test_a_copy_names_its_target_and_can_be_quantised(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target.gguf", Recipe(dtype="f16"))
    output = made_path(target, "trim")
    trim_draft(
        write_llama(tmp_path / "draft.gguf", replace(DRAFT, dtype="f16")), output, (), KEEP, "Q4_0", target
    )
    assert made_drafts(target) == [output]
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(output).tensors}
    assert types["blk.0.attn_q.weight"] == "Q4_0"
    assert read_gguf(output).text(DRAFT_FOR) == file_identity(target)
    trim_draft(output, tmp_path / "again.gguf", keep=KEEP - 8)
    assert read_gguf(tmp_path / "again.gguf").text(DRAFT_FOR) == file_identity(target)
    assert len(list(tmp_path.iterdir())) == 4


def test_files_that_cannot_be_trimmed_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    whole = write_llama(tmp_path / "whole.gguf", DRAFT)
    folder = tmp_path / "new"
    odd = write_llama(
        tmp_path / "odd.gguf", replace(DRAFT, vocabulary=replace(BYTES, types=BYTES.types[:-1]))
    )
    for path, part in (
        (tmp_path / "none.gguf", "no such model file"),
        (truncated(whole, tmp_path / "half.gguf"), "half.gguf"),
        (truncated(whole, tmp_path / "head.gguf", 3000), "head.gguf"),
        (write_llama(tmp_path / "split.gguf", replace(DRAFT, tensors_per_file=6)), "--merge"),
        (odd, "odd.gguf"),
    ):  # fmt: skip
        with pytest.raises(LlamaspecError, match=part) as error:
            trim_draft(path, folder / "trimmed.gguf", keep=KEEP)
        assert "\n" not in str(error.value)
    with pytest.raises(PromptError, match="not UTF-8"):
        trim_draft(whole, folder / "trimmed.gguf", (b"\xff\xfe",), KEEP)
    with pytest.raises(LlamaspecError, match="choose from 258 to 287 with --keep"):
        trim_draft(whole, folder / "trimmed.gguf", (b"\xff\xfe",), 288)  # before texts are tokenized
    with pytest.raises(LlamaspecError, match=r"cannot write into .*whole.gguf.*--output"):
        trim_draft(whole, whole / "trimmed.gguf", keep=KEEP)
    assert not folder.exists()
