"""Random models with every kind of memory, written in milliseconds, so that tests use the real llama.cpp.

Weights are a function of (seed, tensor name). So the same recipe gives the same bytes. Noise gives a draft
that agrees with its target as often as a test wants, and fewer layers give the first layers of the same
model. Unit 0 of the hidden state is the same for every context, and only the end token's score depends on it.

This module does not know llamaspec. test_tiny_models.py shows that llama.cpp loads and runs every kind.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from tiny_vocabulary import BYTES, WORD_PIECE_MARKS, Vocabulary

Array = npt.NDArray[np.float32]
Value = int | float | bool | str | list[int] | list[bool] | list[str]
Keys = dict[str, Value]

CONV, STATE, RANK = 4, 16, 16  # sizes of a Mamba layer
STATE_HEADS = 4  # of a Mamba-2 layer
LATENT, ROPE = 32, 16  # sizes of latent attention
NEVER = -30.0
HIDDEN_SHARE = 0.02  # share of the hidden row in the input of a prediction head
STATE_SHARE = 0.03  # share of the first layer of Qwen 3.5, which its prediction head does not have
N_EXPERTS, N_USED = 4, 2  # of a mixture of experts
WINDOW = 16  # positions that a sliding-window layer sees
MEAN, CLS, LAST, RANK_POOLING = 1, 2, 3, 4  # how the rows of a text become one
TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}


@dataclass(frozen=True)
class Recipe:
    """All parameters of a file."""

    seed: int = 0
    noise: float = 0.0  # share of noise in every matrix; 0 = the model of `seed` itself
    n_layers: int = 2
    width: int = 64
    n_heads: int = 2
    n_kv_heads: int = 2
    head_length: int | None = None  # of each key and value; None = width / n_heads
    n_ffn: int = 96
    n_context: int = 512
    vocabulary: Vocabulary = BYTES
    dtype: str = "f32"  # of the matrices: f32, f16, q8_0 or q4_0
    end_score: float | None = None  # about the end token's score in every context; None = it never comes
    tensors_per_file: int = 0  # split into several files; 0 = one file
    spread: float = 3.0  # standard deviation of the other tokens' scores; 3 gives about 2.5 nats
    shuffled: int | None = None  # seed of a permutation of the token ids
    tied: bool = False  # the embedding is the output matrix (llama only; `end_score` has no effect)

    def draft(self, noise: float = 0.03, **changes: int | str) -> Recipe:
        """Return the recipe of a draft for this model.

        Greedy choices agree at about 0.9 of the positions at noise 0.01, 0.75 at 0.03, 0.6 at 0.06, 0.4 at
        0.1 and 0.1 at 0.3.
        """
        return replace(self, noise=noise, **changes)  # type: ignore[arg-type]

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_length or self.width // self.n_heads


@dataclass
class TinyWeights:
    """Tensors by name, drawn in any order."""

    recipe: Recipe
    tensors: dict[str, Array] = field(default_factory=dict)

    def _draw(self, name: str, shape: Sequence[int], stream: int) -> Array:
        key = (self.recipe.seed, stream, zlib.crc32(name.encode()))
        return np.random.default_rng(key).standard_normal(shape, dtype=np.float32)

    def normal(self, name: str, shape: Sequence[int], deviation: float) -> Array:
        """Draw a tensor; noise does not change its deviation."""
        noise = self.recipe.noise
        values = self._draw(name, shape, 0)
        if noise:
            values = (values + np.float32(noise) * self._draw(name, shape, 1)) * np.float32(
                1 / np.hypot(1, noise)
            )
        self.tensors[name] = values * np.float32(deviation)
        return self.tensors[name]

    def matrix(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> Array:
        """Draw an [n_out, n_in] matrix that multiplies the size of its input by `gain`."""
        return self.normal(f"{name}.weight", (n_out, n_in), gain / np.sqrt(n_in))

    def into_residual(self, name: str, n_in: int, gain: float = 1.0) -> None:
        """Draw a matrix whose output is added to the hidden state, except to unit 0."""
        self.matrix(name, self.recipe.width, n_in, gain)[0] = 0

    def constant(self, name: str, shape: Sequence[int] | int, value: float = 1.0) -> None:
        """Add a tensor that is the same for every seed, such as the weight of a norm."""
        self.tensors[name] = np.full(shape, value, dtype=np.float32)


def write_llama(path: Path, recipe: Recipe | None = None) -> Path:
    """A Llama: every position stays in the memory and can be forgotten."""
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _ends(weights)
    for layer in range(recipe.n_layers):
        _attention(weights, layer, recipe.n_kv_heads)
        feed_forward(weights, layer)
    return write_tensors(path, "llama", weights, attention_keys(recipe))


def write_qwen2vl(path: Path, recipe: Recipe | None = None) -> Path:
    """Qwen2-VL: a Llama whose positions have rows and columns in pictures (M-RoPE)."""
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _ends(weights)
    for layer in range(recipe.n_layers):
        _attention(weights, layer, recipe.n_kv_heads)
        for name in ("q", "k", "v"):
            weights.constant(f"blk.{layer}.attn_{name}.bias", recipe.n_kv_heads * recipe.head_size, 0.0)
        feed_forward(weights, layer)
    sections: Keys = {"rope.dimension_sections": [6, 5, 5, 0]}
    return write_tensors(path, "qwen2vl", weights, attention_keys(recipe) | sections)


def write_longrope(path: Path, recipe: Recipe, n_original: int) -> Path:
    """A Llama with other rotary factors in contexts of more than `n_original` tokens."""
    weights = TinyWeights(recipe)
    _ends(weights)
    for layer in range(recipe.n_layers):
        _attention(weights, layer, recipe.n_kv_heads)
        feed_forward(weights, layer)
    for name, factor in (("short", 1.0), ("long", 4.0)):
        weights.constant(f"rope_factors_{name}.weight", recipe.head_size // 2, factor)
    scaling: Keys = {"type": "longrope", "original_context_length": n_original}
    keys = attention_keys(recipe) | {f"rope.scaling.{key}": value for key, value in scaling.items()}
    return write_tensors(path, "llama", weights, keys)


def write_qwen3(path: Path, recipe: Recipe | None = None, more: Keys | None = None) -> Path:
    """Qwen 3: a Llama with norms of queries and keys, and another order of rotations.

    With a `pooling_type` among `more` metadata, it makes vectors, or with `cls.output`, scores.
    """
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _ends(weights)
    for layer in range(recipe.n_layers):
        _attention(weights, layer, recipe.n_kv_heads)
        feed_forward(weights, layer)
        for norm in ("attn_q_norm", "attn_k_norm"):
            weights.constant(f"blk.{layer}.{norm}.weight", recipe.head_size, 1.5)
    if (more or {}).get("pooling_type") == RANK_POOLING:
        weights.matrix("cls.output", 2, recipe.width)
    return write_tensors(path, "qwen3", weights, attention_keys(recipe) | (more or {}))


def write_mixtral(path: Path, recipe: Recipe | None = None) -> Path:
    """A Llama whose feed-forward layers are mixtures of experts."""
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _ends(weights)
    for layer in range(recipe.n_layers):
        _attention(weights, layer, recipe.n_kv_heads)
        _experts(weights, layer)
    counts: Keys = {"expert_count": N_EXPERTS, "expert_used_count": N_USED}
    return write_tensors(path, "llama", weights, {**attention_keys(recipe), **counts})


def _gemma_layers(weights: TinyWeights, norm_of_keys: float) -> None:
    recipe = weights.recipe
    _ends(weights)
    weights.tensors["token_embd.weight"] /= np.float32(np.sqrt(recipe.width))  # the graph multiplies it back
    for layer in range(recipe.n_layers):
        _attention(weights, layer, recipe.n_kv_heads)
        feed_forward(weights, layer)
        for norm in ("attn_q_norm", "attn_k_norm"):
            weights.constant(f"blk.{layer}.{norm}.weight", recipe.head_size, norm_of_keys)
        for norm in ("post_attention_norm", "post_ffw_norm"):
            weights.constant(f"blk.{layer}.{norm}.weight", recipe.width)


def write_gemma3(path: Path, recipe: Recipe | None = None) -> Path:
    """Gemma 3: every other layer sees a sliding window of 16 positions only."""
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _gemma_layers(weights, 1.5)
    window = {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 2}
    return write_tensors(path, "gemma3", weights, attention_keys(recipe) | window)


def write_gemma_embedding(path: Path, recipe: Recipe | None = None) -> Path:
    """EmbeddingGemma: attention in both directions, in every other layer through a window."""
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _gemma_layers(weights, 1.5)
    window = {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 2}
    keys = attention_keys(recipe) | window | {"pooling_type": MEAN}
    return write_tensors(path, "gemma-embedding", weights, keys)


def write_mamba(path: Path, recipe: Recipe | None = None) -> Path:
    """Mamba: the memory is one state, and no position can be taken out of it."""
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _ends(weights)
    for layer in range(recipe.n_layers):
        _mamba(weights, layer)
    keys = _mamba_keys(recipe) | {"attention.head_count": 0, "feed_forward_length": 0}
    return write_tensors(path, "mamba", weights, keys)


def write_jamba(path: Path, recipe: Recipe | None = None) -> Path:
    """Jamba: Mamba and attention layers in turn; llama.cpp keeps no snapshots of the state."""
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _ends(weights)
    for layer in range(recipe.n_layers):
        if layer % 2 == 0:
            _mamba(weights, layer)
            for norm, size in (("dt", RANK), ("b", STATE), ("c", STATE)):
                weights.constant(f"blk.{layer}.ssm_{norm}_norm.weight", size)
        else:
            _attention(weights, layer, recipe.n_kv_heads)
        feed_forward(weights, layer)
    return write_tensors(
        path, "jamba", weights, attention_keys(recipe) | _mamba_keys(recipe) | _every_other(recipe)
    )


def write_nemotron_h(path: Path, recipe: Recipe | None = None) -> Path:
    """Nemotron-H: a layer is Mamba-2, attention or a feed-forward network, in turn."""
    recipe = recipe or Recipe(n_layers=3)
    weights = TinyWeights(recipe)
    _ends(weights)
    for layer in range(recipe.n_layers):
        block = f"blk.{layer}"
        if layer % 3 == 0:
            _mamba2(weights, layer)
        elif layer % 3 == 1:
            _attention(weights, layer, recipe.n_kv_heads)
        else:
            weights.constant(f"{block}.attn_norm.weight", recipe.width)
            weights.matrix(f"{block}.ffn_up", recipe.n_ffn, recipe.width, 1.2)
            weights.into_residual(f"{block}.ffn_down", recipe.n_ffn)
    keys: Keys = {
        "attention.head_count_kv": [i % 3 % 2 * recipe.n_kv_heads for i in range(recipe.n_layers)],
        "attention.layer_norm_epsilon": 1e-5,
        "feed_forward_length": [i % 3 // 2 * recipe.n_ffn for i in range(recipe.n_layers)],
    }
    return write_tensors(path, "nemotron_h", weights, attention_keys(recipe) | _mamba2_keys(recipe) | keys)


def write_granitehybrid(path: Path, recipe: Recipe | None = None) -> Path:
    """Granite hybrid: Mamba-2 and attention layers in turn; llama.cpp keeps no snapshots of the state."""
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _ends(weights)
    for layer in range(recipe.n_layers):
        if layer % 2 == 0:
            _mamba2(weights, layer)
        else:
            _attention(weights, layer, recipe.n_kv_heads)
        feed_forward(weights, layer)
    scales: Keys = {"logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0}
    keys = attention_keys(recipe) | _mamba2_keys(recipe) | _every_other(recipe) | scales
    return write_tensors(path, "granitehybrid", weights, keys)


def write_lfm2(path: Path, recipe: Recipe | None = None, *, window: int | None = None) -> Path:
    """LFM2: short convolutions and attention in turn; llama.cpp can keep snapshots (``n_rs_seq``)."""
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _ends(weights)
    width = recipe.width
    weights.tensors["token_embd_norm.weight"] = weights.tensors.pop("output_norm.weight")
    for layer in range(recipe.n_layers):
        block = f"blk.{layer}"
        if layer % 2 == 0:
            weights.constant(f"{block}.attn_norm.weight", width)
            weights.normal(f"{block}.shortconv.conv.weight", (width, CONV), 1.0)
            weights.matrix(f"{block}.shortconv.in_proj", 3 * width, width, 1.2)
            weights.into_residual(f"{block}.shortconv.out_proj", width)
        else:
            _attention(weights, layer, recipe.n_kv_heads)
            for norm in ("attn_q_norm", "attn_k_norm"):
                weights.constant(f"{block}.{norm}.weight", recipe.head_size, 1.5)
        feed_forward(weights, layer)
    keys = attention_keys(recipe) | _every_other(recipe) | {"shortconv.l_cache": CONV}
    return write_tensors(
        path, "lfm2", weights, keys | ({"attention.sliding_window": window} if window else {})
    )


def write_deepseek2(path: Path, recipe: Recipe | None = None) -> Path:
    """DeepSeek 2: latent attention, where all heads share one cached row that is key and value."""
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _ends(weights)
    width, n_heads, size = recipe.width, recipe.n_heads, recipe.head_size
    for layer in range(recipe.n_layers):
        block = f"blk.{layer}"
        for norm, n in (("attn_norm", width), ("attn_q_a_norm", LATENT), ("attn_kv_a_norm", LATENT)):
            weights.constant(f"{block}.{norm}.weight", n)
        weights.matrix(f"{block}.attn_q_a", LATENT, width)
        weights.matrix(f"{block}.attn_q_b", n_heads * (size + ROPE), LATENT, 1.6)
        weights.matrix(f"{block}.attn_kv_a_mqa", LATENT + ROPE, width, 1.6)
        weights.normal(f"{block}.attn_k_b.weight", (n_heads, LATENT, size), 1.6 / np.sqrt(LATENT))
        weights.normal(f"{block}.attn_v_b.weight", (n_heads, size, LATENT), 1.2 / np.sqrt(LATENT))
        weights.into_residual(f"{block}.attn_output", n_heads * size, 1.2)
        feed_forward(weights, layer)
    keys: Keys = {
        "vocab_size": len(recipe.vocabulary),
        "leading_dense_block_count": recipe.n_layers,
        "expert_feed_forward_length": recipe.n_ffn,
        "expert_shared_count": 0,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": LATENT,
        "attention.kv_lora_rank": LATENT,
        "attention.key_length": LATENT + ROPE,
        "attention.value_length": LATENT,
        "attention.key_length_mla": size + ROPE,
        "attention.value_length_mla": size,
        "rope.dimension_count": ROPE,
    }
    return write_tensors(path, "deepseek2", weights, attention_keys(recipe) | keys)


def write_qwen35(
    path: Path, recipe: Recipe | None = None, *, n_predictors: int = 1, has_experts: bool = False
) -> Path:
    """Qwen 3.5: a layer with a state, one with attention, and a prediction head that feeds itself.

    With attention alone llama.cpp ends the process at the first evaluation, and with several heads, too.
    """
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _ends(weights)
    _same_size(weights)
    for layer in range(recipe.n_layers):
        _qwen35_layer(weights, layer, has_state=not layer % 2, has_experts=has_experts)
    for head in range(recipe.n_layers, recipe.n_layers + n_predictors):
        _qwen35_layer(weights, head, has_state=False, has_experts=has_experts)
        _prediction_head(weights, head)
    keys: Keys = {
        "full_attention_interval": 2,
        "nextn_predict_layers": n_predictors,
        "block_count": recipe.n_layers + n_predictors,
        "rope.dimension_sections": [6, 5, 5, 0],
        "ssm.conv_kernel": CONV,
        "ssm.state_size": STATE,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 2,
        "ssm.inner_size": 2 * STATE,
    }
    if has_experts:
        keys |= {
            "expert_count": N_EXPERTS,
            "expert_used_count": N_USED,
            "expert_feed_forward_length": recipe.n_ffn,
            "expert_shared_feed_forward_length": recipe.n_ffn,
        }
    kind = "qwen35moe" if has_experts else "qwen35"
    return write_tensors(path, kind, weights, attention_keys(recipe) | keys)


def write_step35(
    path: Path, recipe: Recipe | None = None, *, n_predictors: int = 3, hidden_share: float = HIDDEN_SHARE
) -> Path:
    """Step 3.5 with one dense layer and several prediction heads, one for each draft token; or one head.

    Parameters
    ----------
    hidden_share : float
        Share of the hidden row in the input of a head. With 0, a head computes what the model computes.
    """
    recipe = replace(recipe or Recipe(), n_layers=1)
    weights = TinyWeights(recipe)
    _ends(weights)
    _same_size(weights)
    n_blocks = recipe.n_layers + n_predictors
    for layer in range(n_blocks):
        _attention(weights, layer, recipe.n_kv_heads)
        feed_forward(weights, layer)
        for norm in ("attn_q_norm", "attn_k_norm"):
            weights.constant(f"blk.{layer}.{norm}.weight", recipe.head_size, 1.5)
    for head in range(recipe.n_layers, n_blocks):
        _prediction_head(weights, head, hidden_share)
    keys: Keys = {
        "nextn_predict_layers": n_predictors,
        "block_count": n_blocks,
        "expert_feed_forward_length": recipe.n_ffn,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": [True] * n_blocks,
    }
    return write_tensors(path, "step35", weights, attention_keys(recipe) | keys)


def write_gemma4(path: Path, recipe: Recipe | None = None) -> Path:
    """Gemma 4: a layer with a sliding window, and one without."""
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    _gemma_layers(weights, 0.6)
    weights.constant("rope_freqs.weight", recipe.head_size // 2)
    keys: Keys = {"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0}
    return write_tensors(path, "gemma4", weights, attention_keys(recipe) | _gemma4_keys(recipe) | keys)


def write_gemma4_assistant(path: Path, recipe: Recipe | None = None) -> Path:
    """A random prediction head for the Gemma 4 of this recipe, whose KV cache it reads: seldom right."""
    big = recipe or Recipe()
    recipe = replace(big, width=32)
    weights = TinyWeights(recipe)
    weights.normal("token_embd.weight", (len(recipe.vocabulary), recipe.width), 0.5)
    weights.constant("output_norm.weight", recipe.width)
    weights.constant("rope_freqs.weight", big.head_size // 2)
    weights.matrix("nextn.pre_projection", recipe.width, 2 * big.width)
    weights.matrix("nextn.post_projection", big.width, recipe.width)
    for layer in range(recipe.n_layers):
        block = f"blk.{layer}"
        feed_forward(weights, layer)
        weights.matrix(f"{block}.attn_q", big.width, recipe.width, 1.6)
        weights.matrix(f"{block}.attn_output", recipe.width, big.width, 1.2)
        weights.constant(f"{block}.attn_q_norm.weight", big.head_size, 0.6)
        weights.constant(f"{block}.layer_output_scale.weight", 1)
        for norm in ("attn_norm", "post_attention_norm", "post_ffw_norm"):
            weights.constant(f"{block}.{norm}.weight", recipe.width)
    keys: Keys = {"nextn_predict_layers": recipe.n_layers, "embedding_length_out": big.width}
    return write_tensors(path, "gemma4-assistant", weights, attention_keys(big) | _gemma4_keys(big) | keys)


def _gemma4_keys(recipe: Recipe) -> Keys:
    return {
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": [True, False],
        "attention.key_length_swa": recipe.head_size,
        "attention.value_length_swa": recipe.head_size,
        "rope.freq_base_swa": 100.0,
    }


def write_bert(path: Path, recipe: Recipe | None = None, pooling: int | None = None) -> Path:
    """BERT: makes vectors, or scores with `RANK_POOLING`; without pooling, it is good for nothing."""
    recipe = recipe or Recipe()
    weights = TinyWeights(recipe)
    width = recipe.width
    weights.normal("token_embd.weight", (len(recipe.vocabulary), width), 1.0)
    weights.normal("token_types.weight", (2, width), 0.1)
    weights.normal("position_embd.weight", (recipe.n_context, width), 0.1)
    norms = ["token_embd_norm"]
    for layer in range(recipe.n_layers):
        _attention(weights, layer, recipe.n_heads)
        weights.matrix(f"blk.{layer}.ffn_up", recipe.n_ffn, width)
        weights.matrix(f"blk.{layer}.ffn_down", width, recipe.n_ffn)
        del weights.tensors[f"blk.{layer}.attn_norm.weight"]
        norms += [f"blk.{layer}.attn_output_norm", f"blk.{layer}.layer_output_norm"]
    for norm in norms:
        weights.constant(f"{norm}.weight", width)
        weights.constant(f"{norm}.bias", width, 0.0)
    keys = attention_keys(recipe) | {"attention.layer_norm_epsilon": 1e-5, "attention.causal": False}
    if recipe.vocabulary.model == "bert":
        keys |= {f"tokenizer.ggml.{name}_token_id": i for name, i in WORD_PIECE_MARKS.items()}
    if pooling is not None:
        keys["pooling_type"] = pooling
    if pooling == RANK_POOLING:
        weights.matrix("cls", width, width)
        weights.constant("cls.bias", width, 0.1)
        weights.matrix("cls.output", 1, width)
    return write_tensors(path, "bert", weights, keys)


def write_vocabulary_only(path: Path, recipe: Recipe | None = None, *, architecture: str = "llama") -> Path:
    """A model without weights, as llama.cpp's own test vocabularies are; for tests of bad input."""
    recipe = recipe or Recipe()
    return write_tensors(path, architecture, TinyWeights(recipe), attention_keys(recipe))


def truncated(source: Path, path: Path, n_bytes: int | None = None) -> Path:
    """Write the first `n_bytes` of a file, or its first half."""
    content = source.read_bytes()
    path.write_bytes(content[: len(content) // 2 if n_bytes is None else n_bytes])
    return path


def without_tensors(source: Path, path: Path, part: str) -> Path:
    """Write a copy without the tensors whose names contain `part`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for name, entry in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            kind = entry.types[0]
            sub_type = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), kind, sub_type)
    for tensor in reader.tensors:
        if part not in tensor.name:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


HEAD_WRITERS: dict[str, Callable[..., Path]] = {
    "qwen35": write_qwen35,
    "qwen35moe": partial(write_qwen35, has_experts=True),
    "step35": write_step35,
    "step35-one": partial(write_step35, n_predictors=1),
    "gemma4": write_gemma4,
    "gemma4-assistant": write_gemma4_assistant,
    "step35-blind": partial(write_step35, n_predictors=1, hidden_share=0.0),
}
EMBEDDER_WRITERS: dict[str, Callable[..., Path]] = {
    "gemma-embedding": write_gemma_embedding,
    "bert": partial(write_bert, pooling=MEAN),
    "bert-cls": partial(write_bert, pooling=CLS),
    "bert-rank": partial(write_bert, pooling=RANK_POOLING),
    "qwen3-embedding": partial(write_qwen3, more={"pooling_type": LAST}),
    "qwen3-rank": partial(
        write_qwen3,
        more={
            "pooling_type": RANK_POOLING,
            "classifier.output_labels": ["yes", "no"],
            "tokenizer.chat_template.rerank": "<s>Query: {query}\nDocument: {document}</s>",
        },
    ),
}
WRITERS: dict[str, Callable[..., Path]] = {
    "llama": write_llama,
    "qwen3": write_qwen3,
    "mixtral": write_mixtral,
    "gemma3": write_gemma3,
    "mamba": write_mamba,
    "jamba": write_jamba,
    "lfm2": write_lfm2,
    "nemotron_h": write_nemotron_h,
    "granitehybrid": write_granitehybrid,
    "deepseek2": write_deepseek2,
}


def _ends(weights: TinyWeights) -> None:
    """The matrices before the first layer and after the last."""
    recipe = weights.recipe
    embedding = weights.normal("token_embd.weight", (len(recipe.vocabulary), recipe.width), 0.5)
    embedding[:, 0] = 1.0
    weights.constant("output_norm.weight", recipe.width)
    if recipe.tied:
        embedding *= np.float32(recipe.spread / 0.5 / np.sqrt(recipe.width))
        return
    output = weights.matrix("output", len(recipe.vocabulary), recipe.width, recipe.spread)
    output[:, 0] = 0.0
    output[recipe.vocabulary.eos] = 0.0
    end_score = NEVER if recipe.end_score is None else recipe.end_score
    output[recipe.vocabulary.eos, 0] = end_score * 1.8  # unit 0 leaves the last norm at about 1/1.8


def _attention(weights: TinyWeights, layer: int, n_kv_heads: int) -> None:
    """Attention sharp enough that the text depends on more than the last token."""
    recipe, block = weights.recipe, f"blk.{layer}"
    weights.constant(f"{block}.attn_norm.weight", recipe.width)
    weights.matrix(f"{block}.attn_q", recipe.n_heads * recipe.head_size, recipe.width, 1.6)
    weights.matrix(f"{block}.attn_k", n_kv_heads * recipe.head_size, recipe.width, 1.6)
    weights.matrix(f"{block}.attn_v", n_kv_heads * recipe.head_size, recipe.width, 1.2)
    weights.into_residual(f"{block}.attn_output", recipe.n_heads * recipe.head_size, 1.2)


def feed_forward(weights: TinyWeights, layer: int) -> None:
    recipe, block = weights.recipe, f"blk.{layer}"
    weights.constant(f"{block}.ffn_norm.weight", recipe.width)
    weights.matrix(f"{block}.ffn_gate", recipe.n_ffn, recipe.width, 1.5)
    weights.matrix(f"{block}.ffn_up", recipe.n_ffn, recipe.width, 1.2)
    weights.into_residual(f"{block}.ffn_down", recipe.n_ffn, 1.2)


def _experts(weights: TinyWeights, layer: int) -> None:
    recipe, block = weights.recipe, f"blk.{layer}"
    weights.constant(f"{block}.ffn_norm.weight", recipe.width)
    weights.matrix(f"{block}.ffn_gate_inp", N_EXPERTS, recipe.width, 1.5)
    for name, n_out, n_in in (
        ("gate", recipe.n_ffn, recipe.width),
        ("up", recipe.n_ffn, recipe.width),
        ("down", recipe.width, recipe.n_ffn),
    ):
        weights.normal(f"{block}.ffn_{name}_exps.weight", (N_EXPERTS, n_out, n_in), 1.5 / np.sqrt(n_in))
    weights.tensors[f"{block}.ffn_down_exps.weight"][:, 0] = 0


def _shared_expert(weights: TinyWeights, layer: int) -> None:
    """The expert that computes for every token."""
    recipe, block = weights.recipe, f"blk.{layer}"
    weights.constant(f"{block}.ffn_gate_inp_shexp.weight", recipe.width, 0.01)
    weights.matrix(f"{block}.ffn_gate_shexp", recipe.n_ffn, recipe.width, 1.5)
    weights.matrix(f"{block}.ffn_up_shexp", recipe.n_ffn, recipe.width, 1.2)
    weights.into_residual(f"{block}.ffn_down_shexp", recipe.n_ffn, 0.5)


def _same_size(weights: TinyWeights) -> None:
    """Give all rows of the embedding the same size, so that a norm only scales them."""
    embedding = weights.tensors["token_embd.weight"]
    embedding *= np.float32(0.5) / np.sqrt(np.square(embedding).mean(axis=1, keepdims=True))


def _qwen35_layer(weights: TinyWeights, layer: int, *, has_state: bool, has_experts: bool) -> None:
    recipe, block = weights.recipe, f"blk.{layer}"
    if has_state:
        _delta_net(weights, layer)
    else:
        _attention(weights, layer, recipe.n_kv_heads)
        query = weights.tensors.pop(f"{block}.attn_q.weight").reshape(recipe.n_heads, recipe.head_size, -1)
        gate = np.zeros_like(query)  # half of everything passes
        weights.tensors[f"{block}.attn_q.weight"] = np.concatenate([query, gate], axis=1).reshape(
            2 * recipe.width, -1
        )
        for norm in ("attn_q_norm", "attn_k_norm"):
            weights.constant(f"{block}.{norm}.weight", recipe.head_size, 1.5)
    if has_experts:
        _experts(weights, layer)
        _shared_expert(weights, layer)
    else:
        feed_forward(weights, layer)
    for name in ("ffn_down", "ffn_down_exps", "ffn_down_shexp") if has_state else ():
        if (tensor := weights.tensors.get(f"{block}.{name}.weight")) is not None:
            tensor *= np.float32(STATE_SHARE)
    weights.tensors[f"{block}.post_attention_norm.weight"] = weights.tensors.pop(f"{block}.ffn_norm.weight")


def _delta_net(weights: TinyWeights, layer: int) -> None:
    """A gated delta net with two heads."""
    recipe, block, inner = weights.recipe, f"blk.{layer}", 2 * STATE
    weights.constant(f"{block}.attn_norm.weight", recipe.width)
    weights.matrix(f"{block}.attn_qkv", 3 * inner, recipe.width, 1.5)
    weights.matrix(f"{block}.attn_gate", inner, recipe.width, 1.2)
    weights.normal(f"{block}.ssm_conv1d.weight", (3 * inner, CONV), 0.6)
    weights.constant(f"{block}.ssm_dt.bias", 2, -1.0)
    weights.constant(f"{block}.ssm_a", 2, -0.5)
    for name in ("ssm_beta", "ssm_alpha"):
        weights.matrix(f"{block}.{name}", 2, recipe.width)
    weights.constant(f"{block}.ssm_norm.weight", STATE)
    weights.into_residual(f"{block}.ssm_out", inner, STATE_SHARE)


def _prediction_head(weights: TinyWeights, layer: int, hidden_share: float = HIDDEN_SHARE) -> None:
    """Turn a layer into a head (NextN) that computes what the last layer of the model does.

    It gets the embedding of a token as the model itself does, and a little of the hidden row before it.
    """
    recipe, last = weights.recipe, f"blk.{weights.recipe.n_layers - 1}."
    for name in [name for name in weights.tensors if name.startswith(f"blk.{layer}.")]:
        weights.tensors[name] = weights.tensors[last + name.split(".", 2)[2]]
    embedding = np.eye(recipe.width, dtype=np.float32)
    hidden = weights.matrix(f"blk.{layer}.nextn.eh_proj", recipe.width, recipe.width, hidden_share)
    hidden[0] = 0
    weights.tensors[f"blk.{layer}.nextn.eh_proj.weight"] = np.concatenate([embedding, hidden], axis=1)
    weights.constant(f"blk.{layer}.nextn.enorm.weight", recipe.width, 0.5)
    weights.constant(f"blk.{layer}.nextn.hnorm.weight", recipe.width)


def _mamba(weights: TinyWeights, layer: int) -> None:
    recipe, block, inner = weights.recipe, f"blk.{layer}", 2 * weights.recipe.width
    weights.constant(f"{block}.attn_norm.weight", recipe.width)
    weights.matrix(f"{block}.ssm_in", 2 * inner, recipe.width, 1.5)
    weights.matrix(f"{block}.ssm_conv1d", inner, CONV, 1.2)
    weights.constant(f"{block}.ssm_conv1d.bias", inner, 0.0)
    weights.matrix(f"{block}.ssm_x", RANK + 2 * STATE, inner, 1.0)
    weights.matrix(f"{block}.ssm_dt", inner, RANK, 1.0)
    weights.constant(f"{block}.ssm_dt.bias", inner, -1.0)
    weights.constant(f"{block}.ssm_a", (inner, STATE), -1.0)
    weights.tensors[f"{block}.ssm_a"] *= np.linspace(0.2, 4.0, STATE, dtype=np.float32)  # slow and fast decay
    weights.constant(f"{block}.ssm_d", inner)
    weights.into_residual(f"{block}.ssm_out", inner, 0.3)


def _mamba2(weights: TinyWeights, layer: int) -> None:
    """Mamba-2: one decay for each head."""
    recipe, block, inner = weights.recipe, f"blk.{layer}", 2 * weights.recipe.width
    n_conv = inner + 2 * STATE
    weights.constant(f"{block}.attn_norm.weight", recipe.width)
    weights.matrix(f"{block}.ssm_in", inner + n_conv + STATE_HEADS, recipe.width, 1.5)
    weights.matrix(f"{block}.ssm_conv1d", n_conv, CONV, 1.2)
    weights.constant(f"{block}.ssm_conv1d.bias", n_conv, 0.0)
    weights.constant(f"{block}.ssm_dt.bias", STATE_HEADS, -1.0)
    weights.constant(f"{block}.ssm_a", (STATE_HEADS, 1), -1.0)
    weights.tensors[f"{block}.ssm_a"] *= np.linspace(0.2, 4.0, STATE_HEADS, dtype=np.float32)[:, None]
    weights.constant(f"{block}.ssm_d", (STATE_HEADS, 1))
    weights.constant(f"{block}.ssm_norm.weight", (1, inner))
    weights.into_residual(f"{block}.ssm_out", inner, 0.3)


def attention_keys(recipe: Recipe) -> Keys:
    return {
        "feed_forward_length": recipe.n_ffn,
        "attention.head_count": recipe.n_heads,
        "attention.head_count_kv": recipe.n_kv_heads,
        "attention.key_length": recipe.head_size,
        "attention.value_length": recipe.head_size,
        "rope.dimension_count": recipe.head_size,
        "rope.freq_base": 100.0,
    }


def _mamba_keys(recipe: Recipe) -> Keys:
    return {
        "ssm.conv_kernel": CONV,
        "ssm.inner_size": 2 * recipe.width,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": RANK,
        "ssm.dt_b_c_rms": True,
    }


def _mamba2_keys(recipe: Recipe) -> Keys:
    keys = _mamba_keys(recipe) | {"ssm.group_count": 1, "ssm.time_step_rank": STATE_HEADS}
    del keys["ssm.dt_b_c_rms"]
    return keys


def _every_other(recipe: Recipe) -> Keys:
    """A layer without key and value heads is a recurrent one."""
    return {"attention.head_count_kv": [i % 2 * recipe.n_kv_heads for i in range(recipe.n_layers)]}


def write_tensors(path: Path, architecture: str, weights: TinyWeights, keys: Keys) -> Path:
    recipe = weights.recipe
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=recipe.tensors_per_file)
    writer.add_name(f"tiny {architecture}")
    shape = {
        "block_count": recipe.n_layers,
        "context_length": recipe.n_context,
        "embedding_length": recipe.width,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in {**shape, **keys}.items():
        _add_key(writer, key if key.startswith("tokenizer.") else f"{architecture}.{key}", value)
    vocabulary, tensors = recipe.vocabulary, weights.tensors
    if recipe.shuffled is not None:
        order = np.random.default_rng(recipe.shuffled).permutation(len(vocabulary)).tolist()
        vocabulary = vocabulary.reordered(order)
        tensors |= {name: tensors[name][order] for name in ("token_embd.weight", "output.weight")}
    _add_vocabulary(writer, vocabulary)
    for name, tensor in tensors.items():
        kind = _type_of(name, tensor, recipe.dtype)
        if tensor.dtype == np.int64:
            writer.add_tensor(name, tensor)
            continue
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"), path)


def _type_of(name: str, tensor: Array, dtype: str) -> gguf.GGMLQuantizationType:
    """Return a tensor's type: vectors, norms, convolutions and rows without whole blocks must be float."""
    if tensor.ndim < 2 or not name.endswith(".weight") or "norm" in name or "conv" in name.rsplit(".", 2)[1]:
        return TYPES["f32"]
    if name.startswith(("position_embd", "token_types")) or "ffn_gate_inp" in name or tensor.shape[-1] % 32:
        return TYPES["f32"]
    return TYPES[dtype]


def _add_key(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.model == "gpt2":
        writer.add_tokenizer_pre(vocabulary.pre)
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_token_type_count(2)
