"""Random projectors of pictures in three kinds, for the tiny models.

LLaVA's keeps the order of positions, Qwen2-VL's has rows and columns (M-RoPE), and the model of Gemma 3's
sees the whole picture from each of its tokens. This module does not know llamaspec.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

SIDE, PATCH, WIDTH, FFN = 56, 14, 64, 96


def write_projector(path: Path, kind: str, model_width: int = 64, seed: int = 0) -> Path:
    """Write a projector: mlp (LLaVA), qwen2vl_merger or gemma3."""
    chance = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "clip")

    def add(name: str, *shape: int, gain: float = 1.0) -> None:
        size = np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 1.0
        values = chance.standard_normal(shape, dtype=np.float32) * np.float32(gain / size)
        writer.add_tensor(name, values)

    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    for key, value in {
        "image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": FFN,
        "block_count": 2, "projection_dim": model_width, "attention.head_count": 2,
    }.items():  # fmt: skip
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    add("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH)
    n_patches = (SIDE // PATCH) ** 2
    if kind == "qwen2vl_merger":
        add("v.patch_embd.weight.1", WIDTH, 3, PATCH, PATCH)
    else:
        n_positions = n_patches + (kind == "mlp")
        add("v.position_embd.weight", n_positions, WIDTH)
    if kind == "mlp":
        add("v.class_embd", WIDTH)
        for name in ("pre_ln", "post_ln"):
            add(f"v.{name}.weight", WIDTH)
            add(f"v.{name}.bias", WIDTH)
    else:
        add("v.post_ln.weight", WIDTH)
        add("v.post_ln.bias", WIDTH)
    for layer in range(2):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add(f"v.blk.{layer}.{name}.weight", WIDTH, WIDTH)
            add(f"v.blk.{layer}.{name}.bias", WIDTH, gain=0.1)
        for name in ("ln1", "ln2"):
            add(f"v.blk.{layer}.{name}.weight", WIDTH)
            add(f"v.blk.{layer}.{name}.bias", WIDTH, gain=0.1)
        # Files of these kinds have the names of the two matrices swapped.
        add(f"v.blk.{layer}.ffn_down.weight", FFN, WIDTH)
        add(f"v.blk.{layer}.ffn_down.bias", FFN, gain=0.1)
        add(f"v.blk.{layer}.ffn_up.weight", WIDTH, FFN)
        add(f"v.blk.{layer}.ffn_up.bias", WIDTH, gain=0.1)
    if kind == "mlp":
        add("mm.0.weight", model_width, WIDTH)
        add("mm.0.bias", model_width, gain=0.1)
        add("mm.2.weight", model_width, model_width)
        add("mm.2.bias", model_width, gain=0.1)
    elif kind == "qwen2vl_merger":
        add("mm.0.weight", 4 * WIDTH, 4 * WIDTH)
        add("mm.0.bias", 4 * WIDTH, gain=0.1)
        add("mm.2.weight", model_width, 4 * WIDTH)
        add("mm.2.bias", model_width, gain=0.1)
    else:
        writer.add_uint32("clip.vision.projector.scale_factor", 2)
        add("mm.input_projection.weight", WIDTH, model_width)
        add("mm.soft_emb_norm.weight", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
