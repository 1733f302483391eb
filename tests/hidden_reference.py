"""Drafts that read hidden rows, computed in numpy: EAGLE-3, DFlash, DSpark and DFlash2.

Written after llama.cpp's graphs (`src/models/eagle3.cpp`, `dflash.cpp`) and the papers. Nothing is cached:
each call computes a whole sequence. Positions are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from tiny_hidden import GROUP, KERNEL, MASK, TOP_K, DraftRecipe, tensors_of

Array = npt.NDArray[np.float64]


def read_tensors(path: Path) -> dict[str, Array]:
    """Return the tensors of a file without quantized ones."""
    return {tensor.name: tensor.data.astype(np.float64) for tensor in gguf.GGUFReader(path).tensors}


def normed(x: Array, weight: Array | float = 1.0) -> Array:
    """RMSNorm of the last axis."""
    scaled: Array = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-5) * weight
    return scaled


def silu(x: Array) -> Array:
    gated: Array = x / (1 + np.exp(-x))
    return gated


def rotated(x: Array, positions: Array, base: float, *, in_halves: bool) -> Array:
    """Rotate [n, heads, size] by position: pairs of neighbours, or of the first half with the second."""
    size = x.shape[-1]
    angles = positions[:, None, None] * base ** (-np.arange(0, size, 2) / size)
    first, second = (x[..., : size // 2], x[..., size // 2 :]) if in_halves else (x[..., ::2], x[..., 1::2])
    turned = (
        first * np.cos(angles) - second * np.sin(angles),
        first * np.sin(angles) + second * np.cos(angles),
    )
    return np.concatenate(turned, axis=-1) if in_halves else np.stack(turned, axis=-1).reshape(x.shape)


@dataclass
class Block:
    """What a draft computes for a block."""

    logits: Array  # [B, V]; of DFlash2 before the selector
    confidence: Array | None = None  # [B]
    normed: Array | None = None  # [B, E]


class Reference:
    """A draft for a target."""

    def __init__(self, draft: DraftRecipe, target: Path) -> None:
        self.draft = draft
        borrowed = read_tensors(target)
        own = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in tensors_of(draft).items()}
        self.embedding = own.get("token_embd.weight", borrowed["token_embd.weight"])
        self.output = own.get("output.weight", borrowed.get("output.weight", borrowed["token_embd.weight"]))
        self.w = own
        self.n_vocabulary = len(self.embedding)

    # EAGLE-3

    def eagle3(self, tokens: npt.NDArray[np.int32], rows: Array, drafted: list[int], begin: int = 1) -> Array:
        """Return the logits after the text and after each drafted token: [1 + K, V]."""
        w, draft = self.w, self.draft
        if draft.norm_before_fc:
            rows = normed(rows, w["enc.output_norm.weight"])
        g = rows[begin - 1 : len(tokens) - 1] @ w["fc.weight"].T
        path, logits, own = tokens[begin:].tolist(), list[Array](), np.empty((0, 0))
        for token in [None, *drafted]:
            if token is not None:
                path.append(token)
                g = np.concatenate([g, own])  # the row of the token before
            own = self._eagle3_layer(np.array(path), g, begin)
            logits.append(self._scores(normed(own, w["output_norm.weight"]))[0])
        return np.array(logits)

    def _eagle3_layer(self, path: npt.NDArray[np.int64], g: Array, begin: int) -> Array:
        """Compute the layer for all positions, and return its output for the last one: [1, E]."""
        w, positions = self.w, np.arange(begin - 1, begin - 1 + len(path), dtype=np.float64)
        g_normed = normed(g, w["blk.0.attn_norm_2.weight"])
        embedded = normed(self.embedding[path], w["blk.0.attn_norm.weight"])
        both = np.concatenate([embedded, g_normed], axis=1)
        query, key, value = self._projected(both, 0, positions, in_halves=False)
        attended = self._attention(0, query[-1:], key, value, np.ones((1, len(path)), dtype=bool))
        x = attended + (g_normed if self.draft.norm_before_residual else g)[-1:]
        return self._fed_forward(0, x)

    # Blocks

    def block(self, tokens: npt.NDArray[np.int32], rows: Array, begin: int = 0) -> Block:
        """Compute the block after a text: [last token, mask, ...]."""
        w, draft, n = self.w, self.draft, len(tokens) - 1
        g = normed(rows[begin:n] @ w["fc.weight"].T, w["enc.output_norm.weight"])
        known = np.arange(begin, n, dtype=np.float64)
        positions = np.arange(n, n + draft.block, dtype=np.float64)
        block = np.array([int(tokens[-1])] + [MASK] * (draft.block - 1))
        x = self.embedding[block]
        everywhere = np.concatenate([known, positions])
        for layer in range(draft.recipe.n_layers):
            _, key, value = self._projected(g, layer, known, in_halves=True)
            x = self._block_layer(layer, x, key, value, positions, everywhere)
        normed_x = normed(x, w["output_norm.weight"])
        found = Block(self._scores(normed_x), normed=normed_x)
        return self._markov(found, block) if draft.kind == "dspark" else found

    def _block_layer(
        self, layer: int, x: Array, key: Array, value: Array, positions: Array, everywhere: Array
    ) -> Array:
        w, draft, name = self.w, self.draft, f"blk.{layer}"
        inner = normed(x, w[f"{name}.attn_norm.weight"])
        dynamic = inner @ w[f"{name}.attn_conv_proj.weight"].T if draft.kind == "dflash2" else None
        if dynamic is not None:
            inner = self._convolved(inner, dynamic, w[f"{name}.attn_conv_base"], 0)
        query, own_key, own_value = self._projected(inner, layer, positions, in_halves=True)
        distance = positions[:, None] - everywhere[None, :]
        mask = distance >= 0 if draft.is_causal else np.ones_like(distance, dtype=bool)
        if draft.window is not None and layer == 0:
            mask &= distance < draft.window
        attended = self._attention(
            layer, query, np.concatenate([key, own_key]), np.concatenate([value, own_value]), mask
        )
        if dynamic is not None:
            attended = self._convolved(attended, dynamic, w[f"{name}.attn_conv_base"], 1)
        return self._fed_forward(layer, attended + x)

    def _convolved(self, x: Array, dynamic: Array, base: Array, side: int) -> Array:
        n, width = x.shape
        coefficients = dynamic.reshape(n, 2, KERNEL, width // GROUP)[:, side]
        weights = np.repeat(coefficients, GROUP, axis=2) + base[side]
        padded = np.concatenate([np.zeros((KERNEL - 1, width)), x])
        taps = [weights[:, tap] * padded[KERNEL - 1 - tap :][:n] for tap in range(KERNEL)]
        convolved: Array = np.sum(taps, axis=0)
        return convolved

    def _markov(self, found: Block, block: npt.NDArray[np.int64]) -> Block:
        w, draft, previous = self.w, self.draft, int(block[0])
        logits, confidences = found.logits.copy(), np.full(len(block), np.nan)
        assert found.normed is not None
        for i in range(0 if draft.from_anchor else 1, len(block)):
            w1 = w["markov_w1.weight"][previous]
            bias = np.zeros(self.n_vocabulary)
            bias[draft.draft_ids] = w["markov_w2.weight"] @ w1
            logits[i] += bias
            if draft.has_confidence:
                score = w["conf_proj.weight"][0] @ np.concatenate([found.normed[i], w1])
                confidences[i] = 1 / (1 + np.exp(-score - w["conf_proj.bias"][0]))
            previous = int(logits[i].argmax())
        return Block(logits, confidences if draft.has_confidence else None)

    def lattice_scores(self, found: Block, row: int, previous: int) -> Array:
        """Return DFlash2's scores of the tokens at a position of a block, after a token: [V]."""
        w = self.w
        assert found.normed is not None
        candidates = np.argsort(-found.logits[row])[:TOP_K]
        gate = w["selector_hidden.weight"] @ found.normed[row]
        gated = w["selector_predecessor.weight"][previous] * gate
        scores = np.full(self.n_vocabulary, -np.inf)
        scores[candidates] = (
            w["selector_successor.weight"][candidates] @ gated + found.logits[row, candidates]
        )
        return scores

    # Parts of layers

    def _projected(
        self, x: Array, layer: int, positions: Array, *, in_halves: bool
    ) -> tuple[Array, Array, Array]:
        w, recipe, name = self.w, self.draft.recipe, f"blk.{layer}"
        query, key, value = (
            (x @ w[f"{name}.attn_{part}.weight"].T).reshape(len(x), -1, recipe.head_size) for part in "qkv"
        )
        if f"{name}.attn_q_norm.weight" in w:
            query = normed(query, w[f"{name}.attn_q_norm.weight"])
            key = normed(key, w[f"{name}.attn_k_norm.weight"])
        query, key = (rotated(each, positions, 100.0, in_halves=in_halves) for each in (query, key))
        return query, key, value

    def _attention(
        self, layer: int, query: Array, key: Array, value: Array, mask: npt.NDArray[np.bool_]
    ) -> Array:
        recipe = self.draft.recipe
        n_each = recipe.n_heads // recipe.n_kv_heads
        key, value = np.repeat(key, n_each, axis=1), np.repeat(value, n_each, axis=1)
        scores = query.transpose(1, 0, 2) @ key.transpose(1, 2, 0) / np.sqrt(recipe.head_size)  # [h, q, k]
        scores = np.where(mask[None], scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed: Array = (shares @ value.transpose(1, 0, 2)).transpose(1, 0, 2).reshape(len(query), -1)
        attended: Array = mixed @ self.w[f"blk.{layer}.attn_output.weight"].T
        return attended

    def _fed_forward(self, layer: int, x: Array) -> Array:
        w, name = self.w, f"blk.{layer}"
        inner = normed(x, w[f"{name}.ffn_norm.weight"])
        dynamic = inner @ w[f"{name}.ffn_conv_proj.weight"].T if self.draft.kind == "dflash2" else None
        if dynamic is not None:
            inner = self._convolved(inner, dynamic, w[f"{name}.ffn_conv_base"], 0)
        gated = silu(inner @ w[f"{name}.ffn_gate.weight"].T) * (inner @ w[f"{name}.ffn_up.weight"].T)
        fed = gated @ w[f"{name}.ffn_down.weight"].T
        return x + (fed if dynamic is None else self._convolved(fed, dynamic, w[f"{name}.ffn_conv_base"], 1))

    def _scores(self, x: Array) -> Array:
        scores = np.full((len(x), self.n_vocabulary), -np.inf)
        ids = self.draft.draft_ids if self.draft.n_tokens is not None else np.arange(self.n_vocabulary)
        scores[:, ids] = x @ self.output.T
        return scores
