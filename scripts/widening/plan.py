"""The arithmetic of widening: every tensor of the wide model as a function of the source.

Widening by r repeats every hidden unit r times. With W' = tile(W, (r, r)) a product grows by r; here the
norms (always float32) give the factor back, and the hidden state is r times as large, which a norm does not
see. So no matrix is ever divided: its numbers are the source's own, and it quantises to the same blocks.

Heads are repeated in their places, so that those of keys and values may be repeated less often than those of
queries: several queries then share a key, as in models of today, and the KV cache stays small.

Padding tokens need a score that is low in *every* context, but a Llama has no bias. A spare hidden unit
serves as one: every embedding sets it to c, no layer reads or writes it, so only the mean of squares
notices, by c²/n. RMS norms add an epsilon of the very same kind, and give up as much: the function stays.

A prediction head begins with a matrix over two norms, whose product is a hidden state: these norms do not
give the factor back. Experts are added like layers: they say nothing, and the feed-forward is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from widening.source import Array, Source, UnsuitableFileError

BLOCK = 256  # the largest quantisation block; the spare unit has one to itself
GUARANTEED_RMS = 300.0  # up to this size of the last hidden state a padded token lies below all others
SPARE_UNIT = 64.0  # its value behind the last norm, times the size of the hidden state
LARGEST_HALF = 65504.0  # of float16

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
    n_vocabulary: int | None = None  # with unused tokens up to this number
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
        """A short name for files: x8-kv4-L16-V32768-E32x4-F16."""
        heads = f"-kv{self.n_kv}" if self.n_kv != self.factor else ""
        layers = f"-L{self.n_layers}" if self.n_layers else ""
        vocabulary = f"-V{self.n_vocabulary}" if self.n_vocabulary else ""
        experts = f"-E{self.n_experts}x{self.n_used}" if self.n_experts else ""
        return f"x{self.factor}{heads}{layers}{vocabulary}{experts}-{self.dtype}"


@dataclass(frozen=True)
class Spare:
    """The hidden units behind the repeated ones; the last of them is the constant one."""

    n_units: int
    constant: float  # c, what every embedding puts there
    norm_weight: float  # of the last norm for it
    penalty: float  # what a padded token's output row holds there

    @classmethod
    def for_source(cls, source: Source, factor: int) -> Spare:
        """Spend half of the epsilon's share, rounded down to a power of two that every type can hold."""
        width = source.sizes.width * factor
        n_units = -width % BLOCK + BLOCK
        budget = source.sizes.epsilon * factor**2 * width
        if not 1e-9 < budget < 1e6:
            raise UnsuitableFileError(f"{source.path} has an RMS epsilon without room for padded tokens")
        constant = float(2.0 ** np.floor(np.log2(np.sqrt(budget / 2))))
        shrink = np.sqrt(width / (width + n_units))
        return cls(
            n_units=n_units,
            constant=constant,
            norm_weight=float(SPARE_UNIT * factor * shrink / constant),
            penalty=max(-_largest_score(source) * GUARANTEED_RMS / SPARE_UNIT, -LARGEST_HALF),
        )


def _largest_score(source: Source) -> float:
    """What no real token's score can exceed in size, whatever the context (Cauchy and Schwarz)."""
    name = "output.weight" if source.has("output.weight") else "token_embd.weight"
    rows = source.weight(name) * source.weight("output_norm.weight")
    return float(np.sqrt(np.square(rows).sum(axis=1).max() * source.sizes.width))


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
        The source has more layers or tokens than asked for.
    """

    def __init__(self, source: Source, widening: Widening) -> None:
        sizes = source.sizes
        self.source, self.widening = source, widening
        self.n_layers = widening.n_layers or sizes.n_layers
        self.n_vocabulary = widening.n_vocabulary or sizes.n_vocabulary
        if self.n_layers < sizes.n_layers:
            raise UnsuitableFileError(
                f"{source.path} has {sizes.n_layers} layers already, more than {self.n_layers}"
            )
        if self.n_vocabulary < sizes.n_vocabulary:
            raise UnsuitableFileError(
                f"{source.path} has {sizes.n_vocabulary} tokens already, more than {self.n_vocabulary}"
            )
        pads = self.n_vocabulary > sizes.n_vocabulary
        if pads and (sizes.n_heads_behind or widening.n_experts):
            raise UnsuitableFileError(
                f"{source.path}: no tokens can be added with prediction heads or experts"
            )
        if widening.n_experts and source.architecture != "llama":
            raise UnsuitableFileError(
                f"{source.path} is of architecture {source.architecture}: no experts can be added"
            )
        if widening.n_experts and sizes.n_ffn * widening.factor % N_SHARED:
            raise UnsuitableFileError(f"{source.path} has a feed-forward that is not {N_SHARED} experts")
        self.spare = Spare.for_source(source, widening.factor) if pads else None

    @property
    def width(self) -> int:
        """The width of the hidden state."""
        n_spare = self.spare.n_units if self.spare else 0
        return self.source.sizes.width * self.widening.factor + n_spare

    @property
    def epsilon(self) -> float:
        """What every RMS norm adds to the mean of squares."""
        factor, sizes = self.widening.factor, self.source.sizes
        budget = sizes.epsilon * factor**2 * sizes.width * factor
        return (budget - self.spare.constant**2 if self.spare else budget) / self.width

    def targets(self) -> Iterator[Target]:
        """Every tensor of the wide model, in the order of the file."""
        vocabulary = (self.n_vocabulary, self.width)
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
        """The shape of a layer's tensor: repeated, and with room for the spare units."""
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
            self._fill_vocabulary(target.name, weight, out)
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

    def _fill_vocabulary(self, name: str, weight: Array, out: Array) -> None:
        factor, (n, width) = self.widening.factor, weight.shape
        for i in range(factor):
            out[:n, i * width : (i + 1) * width] = weight
        if name == "token_embd.weight":
            out *= np.float32(factor)
            if self.spare:
                out[:, -1] = self.spare.constant
        elif self.spare:
            out[n:, -1] = self.spare.penalty

    def _fill_norm(self, name: str, weight: Array, out: Array) -> None:
        n = len(weight) * self.widening.factor
        scale = np.sqrt(n / self.width)
        if not any(part in name for part in BEFORE_A_HIDDEN_STATE):
            scale /= self.widening.factor
        out[:n] = np.tile(weight, self.widening.factor).astype(np.float64) * scale
        if self.spare and name == "output_norm.weight":
            out[-1] = self.spare.norm_weight


def _heads_repeated(rows: Array, size: int, n: int) -> Array:
    """Each head, of `size` rows, n times in a row."""
    heads = rows.reshape(-1, size, *rows.shape[1:])
    return np.repeat(heads, n, axis=0).reshape(-1, *rows.shape[1:])
