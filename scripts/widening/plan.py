"""The arithmetic of widening: every tensor of the wide model as a function of the source.

Widening by r repeats every hidden unit r times. With W' = tile(W, (r, r)) a product grows by r; here the
norms (always float32) give the factor back, and the hidden state is r times as large, which a norm does not
see. So no matrix is ever divided: its numbers are the source's own, and it quantises to the same blocks.

Heads are repeated in their places, so that those of keys and values may be repeated less often than those of
queries: several queries then share a key, as in models of today, and the KV cache stays small.

A prediction head begins with a matrix over two norms, whose product is a hidden state: these norms do not
give the factor back. Experts are added like layers: they say nothing, and the feed-forward is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from widening.source import Array, Source, UnsuitableFileError

RESIDUAL_WRITERS = ("attn_output", "ffn_down")
BEFORE_A_HIDDEN_STATE = ("nextn.enorm", "nextn.hnorm")
JOIN = "nextn.eh_proj.weight"  # [E, 2E]: reads the norm of an embedding, and that of a hidden row behind it
N_SHARED = 4  # experts that every token uses: together the source's feed-forward
FEED_FORWARD = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
KEYS_AND_VALUES = ("attn_k.", "attn_v.")


@dataclass(frozen=True)
class Widening:
    """What to make of a source.

    Raises
    ------
    ValueError
        A number is out of range.
    """

    factor: int = 1  # how often every hidden unit is repeated
    n_layers: int | None = None  # with identity layers up to this number
    dtype: str = "F16"  # of the matrices: F16 or F32
    n_experts: int | None = None  # a mixture of that many in every layer, each a quarter of a feed-forward
    n_used: int = 4  # experts that each token uses
    kv_factor: int | None = None  # how often heads of keys and values are repeated; None = as all else

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"the factor must be >= 1, got {self.factor}")
        if self.dtype not in ("F16", "F32"):
            raise ValueError(f"the type must be F16 or F32, got {self.dtype}")
        if self.n_experts is not None and not 1 <= self.n_used <= self.n_experts:
            raise ValueError(f"of {self.n_experts} experts a token cannot use {self.n_used}")

        if self.kv_factor is not None and (self.kv_factor < 1 or self.factor % self.kv_factor):
            raise ValueError(f"the factor of keys and values must divide {self.factor}, got {self.kv_factor}")

    @property
    def n_kv(self) -> int:
        """How often heads of keys and values are repeated."""
        return self.kv_factor or self.factor

    @property
    def label(self) -> str:
        """A short name for files: x8-kv4-L16-E32x4-F16."""
        heads = f"-kv{self.n_kv}" if self.n_kv != self.factor else ""
        layers = f"-L{self.n_layers}" if self.n_layers else ""
        experts = f"-E{self.n_experts}x{self.n_used}" if self.n_experts else ""
        return f"x{self.factor}{heads}{layers}{experts}-{self.dtype}"


@dataclass(frozen=True)
class Target:
    """One tensor of the wide model, before it is computed."""

    name: str
    shape: tuple[int, ...]
    origin: str  # the source's tensor
    silent: bool = False  # a layer that adds nothing: all zeros

    @property
    def is_matrix(self) -> bool:
        """Whether it takes the type of the file; vectors and routers stay float32, as llama.cpp has them."""
        return len(self.shape) >= 2 and not self.is_router

    @property
    def is_router(self) -> bool:
        """Whether it chooses experts."""
        return "ffn_gate_inp" in self.name


class Plan:
    """A source, what to make of it, and every tensor that results.

    Raises
    ------
    UnsuitableFileError
        The source has more layers than asked for, or cannot have experts.
    """

    def __init__(self, source: Source, widening: Widening) -> None:
        sizes = source.sizes
        self.source, self.widening = source, widening
        self.n_layers = widening.n_layers or sizes.n_layers
        if self.n_layers < sizes.n_layers:
            raise UnsuitableFileError(
                f"{source.path} has {sizes.n_layers} layers already, more than {self.n_layers}"
            )
        if widening.n_experts and source.architecture != "llama":
            raise UnsuitableFileError(
                f"{source.path} is of architecture {source.architecture}: no experts can be added"
            )
        if widening.n_experts and sizes.n_ffn * widening.factor % N_SHARED:
            raise UnsuitableFileError(f"{source.path} has a feed-forward that is not {N_SHARED} experts")

    @property
    def width(self) -> int:
        """The width of the hidden state."""
        return self.source.sizes.width * self.widening.factor

    @property
    def epsilon(self) -> float:
        """What every RMS norm adds to the mean of squares, which is larger by the square of the factor."""
        return self.source.sizes.epsilon * self.widening.factor**2

    def targets(self) -> Iterator[Target]:
        """Every tensor of the wide model, in the order of the file."""
        vocabulary = (self.source.sizes.n_vocabulary, self.width)
        output = "output.weight" if self.source.has("output.weight") else "token_embd.weight"
        yield Target("token_embd.weight", vocabulary, "token_embd.weight")
        yield Target("output.weight", vocabulary, output)
        yield Target("output_norm.weight", (self.width,), "output_norm.weight")
        if self.source.has("rope_freqs.weight"):
            shape = self.source.weight("rope_freqs.weight").shape
            yield Target("rope_freqs.weight", shape, "rope_freqs.weight")
        n_trunk = self.source.sizes.n_layers
        for layer in range(self.n_layers):
            yield from self._layer(layer, layer % n_trunk, silent=layer >= n_trunk)
        for i in range(self.source.sizes.n_heads_behind):
            yield from self._layer(self.n_layers + i, n_trunk + i, silent=False)

    def _layer(self, layer: int, source_layer: int, *, silent: bool) -> Iterator[Target]:
        origin = f"blk.{source_layer}."
        for name in self.source.tensors:
            if not name.startswith(origin):
                continue
            part = name.removeprefix(origin)
            is_silent = silent and part.startswith(RESIDUAL_WRITERS)
            if self.widening.n_experts and part in FEED_FORWARD:
                kind = part.removesuffix(".weight")
                shape = self._shape(part, name)
                yield Target(f"blk.{layer}.{kind}_shexp.weight", shape, name, is_silent)
                yield self._experts(layer, kind, name, shape)
            else:
                yield Target(f"blk.{layer}.{part}", self._shape(part, name), name, is_silent)
        if self.widening.n_experts:
            router = f"blk.{layer}.ffn_gate_inp.weight"
            yield Target(router, (self.widening.n_experts, self.width), f"{origin}ffn_gate.weight")

    def _experts(self, layer: int, kind: str, origin: str, shape: tuple[int, ...]) -> Target:
        """The matrices of all experts of a layer: each is a part of the feed-forward, and adds nothing."""
        assert self.widening.n_experts is not None
        inner = 1 if kind == "ffn_down" else 0
        sizes = [n // N_SHARED if i == inner else n for i, n in enumerate(shape)]
        name = f"blk.{layer}.{kind}_exps.weight"
        return Target(name, (self.widening.n_experts, *sizes), origin, silent=kind == "ffn_down")

    def _shape(self, part: str, origin: str) -> tuple[int, ...]:
        """The shape of a layer's tensor, repeated."""
        factor, width = self.widening.factor, self.width
        if part == JOIN:
            return width, 2 * width
        sizes = [int(n) * factor for n in reversed(self.source.tensors[origin].shape)]  # GGUF: n_in first
        if part.startswith(KEYS_AND_VALUES):
            sizes[0] = sizes[0] // factor * self.widening.n_kv
        if part.startswith(RESIDUAL_WRITERS) or "norm" in part:
            sizes[0] = width
        elif len(sizes) == 2:
            sizes[1] = width
        return tuple(sizes)

    def compute(self, target: Target) -> Array:
        """The numbers of one tensor, float32 [target.shape]."""
        out = np.zeros(target.shape, dtype=np.float32)
        if target.silent:
            return out
        weight, factor = self.source.weight(target.origin), self.widening.factor
        if target.name == "rope_freqs.weight":
            return weight
        if target.name in ("token_embd.weight", "output.weight"):
            out[:] = np.tile(weight, (1, factor)) * (factor if target.name == "token_embd.weight" else 1)
        elif "norm" in target.name:
            self._fill_norm(target.name, weight, out)
        elif target.name.endswith(JOIN):
            halves = weight.reshape(len(weight), 2, -1)
            out[:] = np.tile(halves, (factor, 1, factor)).reshape(out.shape)
        elif target.is_router:
            self._fill_router(target, out)
        elif len(target.shape) == 3:  # experts: each begins elsewhere in the feed-forward
            wide = np.tile(weight, (factor,) * weight.ndim)
            for i, expert in enumerate(out):
                expert[:] = np.roll(wide, -i * len(expert) - i // N_SHARED, axis=0)[: len(expert)]
        else:
            wide = self._repeated(target.name, weight)
            if wide.ndim == 1 and any(name in target.name for name in RESIDUAL_WRITERS):
                wide *= factor  # a bias is added to a hidden state that is so many times larger
            out[tuple(slice(n) for n in wide.shape)] = wide
        return out

    def _repeated(self, name: str, weight: Array) -> Array:
        """A matrix [n_out, n_in], or a bias [n_out], of a layer with all its units repeated."""
        factor, size = self.widening.factor, self.source.sizes.head_size
        if ".attn_output." in name and weight.ndim == 2:  # reads heads
            return np.tile(_heads_repeated(weight.T, size, factor).T, (factor, 1))
        if ".attn_output." in name or ".attn_" not in name:
            return np.tile(weight, (factor,) * weight.ndim)
        n = factor if ".attn_q." in name else self.widening.n_kv
        heads = _heads_repeated(weight, size, n)
        return np.tile(heads, (1, factor)) if weight.ndim == 2 else heads

    def _fill_router(self, target: Target, out: Array) -> None:
        """Directions at random: tokens whose hidden states are alike choose the same experts."""
        layer = int(target.name.split(".")[1])
        out[:] = np.random.default_rng(layer).standard_normal(out.shape, dtype=np.float32)

    def _fill_norm(self, name: str, weight: Array, out: Array) -> None:
        factor = self.widening.factor
        gives_back = not any(part in name for part in BEFORE_A_HIDDEN_STATE)
        out[:] = np.tile(weight, factor) / (factor if gives_back else 1)


def _heads_repeated(rows: Array, size: int, n: int) -> Array:
    """Each head, of `size` rows, n times in a row."""
    heads = rows.reshape(-1, size, *rows.shape[1:])
    return np.repeat(heads, n, axis=0).reshape(-1, *rows.shape[1:])
