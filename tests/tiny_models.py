"""Random models of every memory kind, written in milliseconds, so that tests meet the real llama.cpp.

The one idea: weights are a function of (seed, tensor name). The same recipe gives the same bytes; with noise
it gives a draft that agrees with its target as often as a test wants; with fewer layers, the first of them.
Unit 0 of the hidden state is the same for every context; only the end token's score reads it.

It does not know llamaspec. test_tiny_models.py proves that llama.cpp loads and runs every kind.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from tiny_vocabulary import BYTES, Vocabulary

Array = npt.NDArray[np.float32]

CONV, STATE, RANK = 4, 16, 4  # sizes of a Mamba layer
NEVER = -30.0
WINDOW = 16  # positions that a sliding-window layer sees
TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a file."""

    seed: int = 0
    noise: float = 0.0  # share of fresh noise in every matrix: 0 = the model of `seed` itself
    n_layers: int = 2
    width: int = 64
    n_heads: int = 2
    n_kv_heads: int = 2
    n_ffn: int = 96
    n_context: int = 512
    vocabulary: Vocabulary = BYTES
    dtype: str = "f32"  # of the matrices: f32, f16, q8_0 or q4_0
    end_score: float | None = None  # roughly the end token's score in every context; None: it never comes
    tensors_per_file: int = 0  # split into several files; 0 = one file
    spread: float = 3.0  # standard deviation of the other tokens' scores; 3 gives about 2.5 nats
    tied: bool = (
        False  # no output matrix: the embedding serves (llama only; end_score is then without effect)
    )

    def draft(self, noise: float = 0.03, **changes: int | str) -> Recipe:
        """A model that often drafts what this one says.

        Greedy choices agree on about 0.9 of the positions at noise 0.01, 0.75 at 0.03, 0.6 at 0.06,
        0.4 at 0.1, 0.1 at 0.3: a random model has no reason to be robust.
        """
        return replace(self, noise=noise, **changes)  # type: ignore[arg-type]

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.width // self.n_heads


@dataclass
class _Weights:
    """Tensors by name, drawn in any order."""

    recipe: Recipe
    tensors: dict[str, Array] = field(default_factory=dict)

    def _draw(self, name: str, shape: Sequence[int], stream: int) -> Array:
        key = (self.recipe.seed, stream, zlib.crc32(name.encode()))
        return np.random.default_rng(key).standard_normal(shape, dtype=np.float32)

    def normal(self, name: str, shape: Sequence[int], deviation: float) -> Array:
        """Draw a tensor; the noise keeps its deviation."""
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
        """Draw a matrix whose output is added to the hidden state, but never to its unit 0."""
        self.matrix(name, self.recipe.width, n_in, gain)[0] = 0

    def constant(self, name: str, shape: Sequence[int] | int, value: float = 1.0) -> None:
        """A tensor that is the same for every seed, such as the weight of a norm."""
        self.tensors[name] = np.full(shape, value, dtype=np.float32)


def write_llama(path: Path, recipe: Recipe | None = None) -> Path:
    """A Llama: every position stays in the memory and can be forgotten."""
    recipe = recipe or Recipe()
    weights = _Weights(recipe)
    _ends(weights)
    for layer in range(recipe.n_layers):
        _attention(weights, layer, recipe.n_kv_heads)
        _feed_forward(weights, layer)
    return _write(path, "llama", weights, _attention_keys(recipe))


def write_gemma3(path: Path, recipe: Recipe | None = None) -> Path:
    """Gemma 3: every other layer sees a sliding window of 16 positions only."""
    recipe = recipe or Recipe()
    weights = _Weights(recipe)
    _ends(weights)
    weights.tensors["token_embd.weight"] /= np.float32(np.sqrt(recipe.width))  # the graph multiplies it back
    for layer in range(recipe.n_layers):
        _attention(weights, layer, recipe.n_kv_heads)
        _feed_forward(weights, layer)
        for norm in ("attn_q_norm", "attn_k_norm"):
            weights.constant(f"blk.{layer}.{norm}.weight", recipe.head_size, 1.5)
        for norm in ("post_attention_norm", "post_ffw_norm"):
            weights.constant(f"blk.{layer}.{norm}.weight", recipe.width)
    window = {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 2}
    return _write(path, "gemma3", weights, _attention_keys(recipe) | window)


def write_mamba(path: Path, recipe: Recipe | None = None) -> Path:
    """Mamba: the memory is one state, and no position can be taken out of it."""
    recipe = recipe or Recipe()
    weights = _Weights(recipe)
    _ends(weights)
    for layer in range(recipe.n_layers):
        _mamba(weights, layer)
    keys = _mamba_keys(recipe) | {"attention.head_count": 0, "feed_forward_length": 0}
    return _write(path, "mamba", weights, keys)


def write_jamba(path: Path, recipe: Recipe | None = None) -> Path:
    """Jamba: Mamba and attention layers in turn; llama.cpp keeps no snapshots of the state."""
    recipe = recipe or Recipe()
    weights = _Weights(recipe)
    _ends(weights)
    for layer in range(recipe.n_layers):
        if layer % 2 == 0:
            _mamba(weights, layer)
            for norm, size in (("dt", RANK), ("b", STATE), ("c", STATE)):
                weights.constant(f"blk.{layer}.ssm_{norm}_norm.weight", size)
        else:
            _attention(weights, layer, recipe.n_kv_heads)
        _feed_forward(weights, layer)
    return _write(
        path, "jamba", weights, _attention_keys(recipe) | _mamba_keys(recipe) | _every_other(recipe)
    )


def write_lfm2(path: Path, recipe: Recipe | None = None, *, window: int | None = None) -> Path:
    """LFM2: short convolutions and attention in turn; llama.cpp can keep snapshots (``n_rs_seq``)."""
    recipe = recipe or Recipe()
    weights = _Weights(recipe)
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
        _feed_forward(weights, layer)
    keys = _attention_keys(recipe) | _every_other(recipe) | {"shortconv.l_cache": CONV}
    return _write(path, "lfm2", weights, keys | ({"attention.sliding_window": window} if window else {}))


def write_bert(path: Path, recipe: Recipe | None = None) -> Path:
    """BERT: loads, but has no scores of next tokens; for tests of bad input."""
    recipe = recipe or Recipe()
    weights = _Weights(recipe)
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
    keys = _attention_keys(recipe) | {"attention.layer_norm_epsilon": 1e-5, "attention.causal": False}
    return _write(path, "bert", weights, keys)


def write_vocabulary_only(path: Path, recipe: Recipe | None = None) -> Path:
    """A Llama without weights, as llama.cpp's own test vocabularies are; for tests of bad input."""
    recipe = recipe or Recipe()
    return _write(path, "llama", _Weights(recipe), _attention_keys(recipe))


def truncated(source: Path, path: Path, n_bytes: int | None = None) -> Path:
    """The first `n_bytes` of a file; half of it unless told."""
    content = source.read_bytes()
    path.write_bytes(content[: len(content) // 2 if n_bytes is None else n_bytes])
    return path


WRITERS: dict[str, Callable[..., Path]] = {
    "llama": write_llama,
    "gemma3": write_gemma3,
    "mamba": write_mamba,
    "jamba": write_jamba,
    "lfm2": write_lfm2,
}


def _ends(weights: _Weights) -> None:
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


def _attention(weights: _Weights, layer: int, n_kv_heads: int) -> None:
    """Attention sharp enough that the text depends on more than the last token."""
    recipe, block = weights.recipe, f"blk.{layer}"
    weights.constant(f"{block}.attn_norm.weight", recipe.width)
    weights.matrix(f"{block}.attn_q", recipe.width, recipe.width, 1.6)
    weights.matrix(f"{block}.attn_k", n_kv_heads * recipe.head_size, recipe.width, 1.6)
    weights.matrix(f"{block}.attn_v", n_kv_heads * recipe.head_size, recipe.width, 1.2)
    weights.into_residual(f"{block}.attn_output", recipe.width, 1.2)


def _feed_forward(weights: _Weights, layer: int) -> None:
    recipe, block = weights.recipe, f"blk.{layer}"
    weights.constant(f"{block}.ffn_norm.weight", recipe.width)
    weights.matrix(f"{block}.ffn_gate", recipe.n_ffn, recipe.width, 1.5)
    weights.matrix(f"{block}.ffn_up", recipe.n_ffn, recipe.width, 1.2)
    weights.into_residual(f"{block}.ffn_down", recipe.n_ffn, 1.2)


def _mamba(weights: _Weights, layer: int) -> None:
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


def _attention_keys(recipe: Recipe) -> dict[str, int | float | bool | list[int]]:
    return {
        "feed_forward_length": recipe.n_ffn,
        "attention.head_count": recipe.n_heads,
        "attention.head_count_kv": recipe.n_kv_heads,
        "attention.key_length": recipe.head_size,
        "attention.value_length": recipe.head_size,
        "rope.dimension_count": recipe.head_size,
        "rope.freq_base": 100.0,
    }


def _mamba_keys(recipe: Recipe) -> dict[str, int | float | bool | list[int]]:
    return {
        "ssm.conv_kernel": CONV,
        "ssm.inner_size": 2 * recipe.width,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": RANK,
        "ssm.dt_b_c_rms": True,
    }


def _every_other(recipe: Recipe) -> dict[str, int | float | bool | list[int]]:
    """A layer without key and value heads is a recurrent one."""
    return {"attention.head_count_kv": [i % 2 * recipe.n_kv_heads for i in range(recipe.n_layers)]}


def _write(
    path: Path, architecture: str, weights: _Weights, keys: dict[str, int | float | bool | list[int]]
) -> Path:
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
        _add_key(writer, f"{architecture}.{key}", value)
    _add_vocabulary(writer, recipe.vocabulary)
    for name, tensor in weights.tensors.items():
        kind = _type_of(name, tensor, recipe.dtype)
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"), path)


def _type_of(name: str, tensor: Array, dtype: str) -> gguf.GGMLQuantizationType:
    """Vectors, convolutions and rows that are no whole blocks stay float, as llama.cpp wants them."""
    if tensor.ndim < 2 or not name.endswith(".weight") or "conv" in name.rsplit(".", 2)[1]:
        return TYPES["f32"]
    if name.startswith(("position_embd", "token_types")) or tensor.shape[-1] % 32:
        return TYPES["f32"]
    return TYPES[dtype]


def _add_key(writer: gguf.GGUFWriter, key: str, value: int | float | bool | list[int]) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.model == "gpt2":
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_token_type_count(2)
