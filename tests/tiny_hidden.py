"""Random drafts that read a target's hidden rows: EAGLE-3, DFlash, DSpark and DFlash2, in milliseconds.

`hidden_reference.py` computes them without llama.cpp. Tensors may be left out and borrowed from the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tiny_models import Keys, Recipe, TinyWeights, attention_keys, feed_forward, write_tensors

RANK, TOP_K, KERNEL, GROUP = 8, 4, 3, 16  # of DSpark's Markov head, and of DFlash2
MASK = 7  # the token of positions that a block leaves open


@dataclass(frozen=True)
class DraftRecipe:
    """A draft for the target of a recipe."""

    target: Recipe = field(default_factory=Recipe)
    kind: str = "dflash"  # eagle3, dflash, dspark or dflash2
    layers: tuple[int, ...] = (0, 1, 1)  # whose inputs it reads
    seed: int = 5
    block: int = 5
    from_anchor: bool = True  # DSpark: the last token's row predicts, too
    is_causal: bool = False
    has_confidence: bool = True
    n_tokens: int | None = None  # size of its own vocabulary, which d2t maps; None = the target's
    own_ends: bool = False  # own embedding and output
    norm_before_fc: bool = False  # EAGLE-3.1
    norm_before_residual: bool = False
    window: int | None = None  # sliding window of the first layer
    sections: bool = False  # M-RoPE
    width: int | None = None  # of its own hidden rows (EAGLE-3); None = the target's
    without: str = ""  # a tensor that it lacks

    @property
    def recipe(self) -> Recipe:
        """The shape of its own layers."""
        n_layers = 1 if self.kind == "eagle3" else 2
        width = self.width or self.target.width
        return replace(self.target, seed=self.seed, noise=0.0, n_layers=n_layers, dtype="f32", width=width)

    @property
    def draft_ids(self) -> np.ndarray:
        """The target's tokens in the draft's vocabulary: int64, ascending."""
        n = len(self.target.vocabulary)
        wanted = n if self.n_tokens is None else self.n_tokens
        rng = np.random.default_rng(self.seed)
        return np.sort(rng.permutation(n)[:wanted]).astype(np.int64)


def tensors_of(draft: DraftRecipe) -> dict[str, np.ndarray]:
    """Return the tensors of a draft by name."""
    recipe, is_eagle = draft.recipe, draft.kind == "eagle3"
    weights, width, n_in = TinyWeights(recipe), recipe.width, draft.target.width * len(draft.layers)
    weights.matrix("fc", width, n_in)
    if is_eagle and draft.norm_before_fc:
        weights.normal("enc.output_norm.weight", (n_in,), 0.3)
    if not is_eagle:
        weights.constant("enc.output_norm.weight", width)
    weights.normal("output_norm.weight", (width,), 0.5)
    for layer in range(recipe.n_layers):
        _layer(weights, draft, layer)
    n_own = len(draft.draft_ids)
    if draft.own_ends:
        weights.normal("token_embd.weight", (len(recipe.vocabulary), width), 0.5)
    if draft.own_ends or draft.n_tokens is not None:
        weights.matrix("output", n_own, width, 3.0)
    if draft.n_tokens is not None:
        weights.tensors["d2t"] = draft.draft_ids
    if draft.kind == "dspark":
        weights.normal("markov_w1.weight", (len(recipe.vocabulary), RANK), 1.0)
        weights.normal("markov_w2.weight", (n_own, RANK), 1.0)
        if draft.has_confidence:
            weights.normal("conf_proj.weight", (1, width + RANK), 0.2)
            weights.normal("conf_proj.bias", (1,), 0.5)
    if draft.kind == "dflash2":
        for name in ("selector_predecessor", "selector_successor"):
            weights.normal(f"{name}.weight", (len(recipe.vocabulary), RANK), 1.0)
        weights.matrix("selector_hidden", RANK, width)
    return dict(weights.tensors)


def _layer(weights: TinyWeights, draft: DraftRecipe, layer: int) -> None:
    recipe, block, is_eagle = weights.recipe, f"blk.{layer}", draft.kind == "eagle3"
    width, inner = recipe.width, recipe.n_heads * recipe.head_size
    n_in = 2 * width if is_eagle else width
    weights.normal(f"{block}.attn_norm.weight", (width,), 1.0)
    if is_eagle:
        weights.normal(f"{block}.attn_norm_2.weight", (width,), 1.0)
    else:
        for name in ("attn_q_norm", "attn_k_norm"):
            weights.normal(f"{block}.{name}.weight", (recipe.head_size,), 1.5)
    weights.matrix(f"{block}.attn_q", inner, n_in, 1.6)
    weights.matrix(f"{block}.attn_k", recipe.n_kv_heads * recipe.head_size, n_in, 1.6)
    weights.matrix(f"{block}.attn_v", recipe.n_kv_heads * recipe.head_size, n_in, 1.2)
    weights.matrix(f"{block}.attn_output", width, inner)
    feed_forward(weights, layer)
    if draft.kind == "dflash2":
        n_groups = width // GROUP
        for part in ("attn", "ffn"):
            weights.normal(f"{block}.{part}_conv_base", (2, KERNEL, width), 0.5)
            weights.matrix(f"{block}.{part}_conv_proj", 2 * KERNEL * n_groups, width, 0.5)


def keys_of(draft: DraftRecipe) -> Keys:
    """Return the metadata of a draft."""
    keys: Keys = attention_keys(draft.recipe)
    keys |= {"target_layers": [*draft.layers]}
    if draft.kind == "eagle3":
        return keys | {
            "target_hidden_size": draft.target.width,
            "norm_before_residual": draft.norm_before_residual,
            "norm_before_fc": draft.norm_before_fc,
        }
    keys |= {
        "block_size": draft.block,
        "attention.causal": draft.is_causal,
        "tokenizer.ggml.mask_token_id": MASK,
    }
    if draft.window:
        keys |= {"attention.sliding_window": draft.window, "attention.sliding_window_pattern": [True, False]}
    if draft.sections:
        keys |= {"rope.dimension_sections": [draft.recipe.head_size // 2, 0, 0, 0]}
    if draft.kind == "dspark":
        keys |= {"sample_from_anchor": draft.from_anchor, "has_confidence_head": draft.has_confidence}
    if draft.kind == "dflash2":
        keys |= {
            "conv_kernel_size": KERNEL,
            "conv_group_size": GROUP,
            "selector_rank": RANK,
            "selector_top_k": TOP_K,
        }
    return keys


def write_draft(path: Path, draft: DraftRecipe, **changed: int | float | bool | list[int]) -> Path:
    """Write a draft, perhaps with damaged metadata."""
    architecture = "eagle3" if draft.kind == "eagle3" else "dflash"
    weights = TinyWeights(draft.recipe)
    weights.tensors |= tensors_of(draft)
    weights.tensors.pop(draft.without, None)
    keys = keys_of(draft) | {key.replace("__", "."): value for key, value in changed.items()}
    return write_tensors(path, architecture, weights, keys)
