"""Files of GGUF that are no whole models of text, as people have them beside their models."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from llamaspec.llama.file_facts import Kind
from model_store import ModelStore
from tiny_hidden import DraftRecipe
from tiny_models import (
    Recipe,
    TinyWeights,
    attention_keys,
    truncated,
    without_tensors,
    write_bert,
    write_tensors,
    write_vocabulary_only,
)

WHOLE = Recipe(dtype="q8_0")
CUT = "is cut short or damaged"


def write_odd_files(folder: Path, store: ModelStore) -> dict[str, Kind | str]:
    """Write one file of each kind; return the kinds, or what is said of the file, by name."""
    model, heads = store.path("llama", WHOLE), store.path("step35", WHOLE)
    _write(folder / "lora.gguf", "llama", "adapter", "blk.0.attn_q.weight.lora_a")
    _write(folder / "imatrix.gguf", None, "imatrix", "blk.0.attn_q.weight.in_sum2")
    _write(folder / "control.gguf", "controlvector", None, "direction.1")
    _write(folder / "mmproj.gguf", "clip", "mmproj", "v.patch_embd.weight")
    _write(folder / "picture.gguf", "flux", None, "double_blocks.0.img_attn.qkv.weight")
    write_bert(folder / "bert.gguf")
    write_vocabulary_only(folder / "vocabulary.gguf")
    diffusion = TinyWeights(WHOLE, {"token_embd.weight": np.ones((8, 8), dtype=np.float32)})
    write_tensors(folder / "llada.gguf", "llada", diffusion, attention_keys(WHOLE))
    embedding = {**attention_keys(WHOLE), "attention.causal": False}
    write_tensors(folder / "embedding.gguf", "qwen3", diffusion, embedding)
    without_tensors(heads, folder / "heads.gguf", "blk.0.")
    (folder / "eagle3.gguf").symlink_to(store.draft(DraftRecipe(WHOLE, "eagle3")))
    truncated(model, folder / "cut.gguf", model.stat().st_size - 1)
    truncated(model, folder / "half.gguf")
    (folder / "empty.gguf").touch()
    (folder / "pointer.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    (folder / "gone.gguf").symlink_to(folder / "nowhere")
    return {
        "lora": Kind.ADAPTER, "imatrix": Kind.IMPORTANCE, "control": Kind.CONTROL_VECTOR,
        "mmproj": Kind.PROJECTOR, "picture": Kind.OTHER, "bert": Kind.EMBEDDING, "llada": Kind.DIFFUSION,
        "vocabulary": Kind.VOCABULARY, "embedding": Kind.EMBEDDING, "heads": Kind.DRAFT, "eagle3": Kind.DRAFT,
        "cut": CUT, "half": CUT, "empty": CUT, "pointer": CUT, "gone": "cannot be read",
    }  # fmt: skip


def _write(path: Path, architecture: str | None, kind: str | None, tensor: str) -> None:
    """Write a file with one tensor and no vocabulary."""
    writer = gguf.GGUFWriter(path, architecture or "")
    if architecture is None:
        writer.kv_data[0].clear()
    if kind is not None:
        writer.add_type(kind)
    writer.add_tensor(tensor, np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
