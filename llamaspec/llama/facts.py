"""What a loaded model is, and what its KV cache does: measured where that is possible, not looked up by name.

The KV cache is tried as a round uses it: some tokens are read, some draft tokens are evaluated, and then a
sequence is wanted that differs in the last of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.llama.recurrent import RecurrentCache
from llamaspec.values import TARGET, ForwardRequest, TokenArray

if TYPE_CHECKING:
    from llamaspec.llama.context import Context
    from llamaspec.llama.model import LlamaModel

Metadata = Callable[[str], str | None]  # key -> value as text

N_READ, N_DRAFTED = 16, 4  # tokens of the trial
N_REJECTED = 2  # the last draft tokens, which the trial rejects
_ROW = -1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the weights are."""

    architecture: str
    n_parameters: int
    n_active_parameters: int | None  # used for one token, roughly; None where all of them are
    weights_bytes: int
    window: int | None  # positions that some layers look back; None = all layers see everything
    keeps_states: bool  # some layers keep a state
    keeps_positions: bool  # some layers keep keys and values

    @property
    def n_computing(self) -> int:
        """Parameters that one token costs."""
        return self.n_active_parameters or self.n_parameters


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What the KV cache needs, and what is left of it when the last draft tokens are rejected."""

    bytes_per_token: float
    fixed_bytes: int  # of states, whatever the length of the text
    n_right: int  # tokens of the trial that stayed right
    n_kept: int  # of them, those that the memory still held
    snapshot_bytes: int = 0  # of a copy of the states; 0 where none are taken
    snapshot_seconds: float = 0.0  # to copy the states once and to put them back

    @property
    def n_reread(self) -> int:
        """Tokens that had to be read again."""
        return self.n_right - self.n_kept

    def size(self, n_ctx: int) -> int:
        """Bytes for a whole context."""
        return self.fixed_bytes + round(self.bytes_per_token * n_ctx)


def model_facts(model: Any, metadata: Metadata) -> ModelFacts:
    """Look at the weights of a loaded llama_model."""
    n_parameters = int(lib.llama_model_n_params(model))
    recurrent = bool(lib.llama_model_is_recurrent(model))
    return ModelFacts(
        architecture=metadata("general.architecture") or "unknown",
        n_parameters=n_parameters,
        n_active_parameters=active_parameters(metadata, n_parameters),
        weights_bytes=int(lib.llama_model_size(model)),
        window=int(lib.llama_model_n_swa(model)) or None,
        keeps_states=recurrent or bool(lib.llama_model_is_hybrid(model)),
        keeps_positions=not recurrent,
    )


def active_parameters(metadata: Metadata, n_parameters: int) -> int | None:
    """Parameters of a mixture of experts that one token uses; None for other models.

    All but the matrices (gate, up, down) of the experts that are not chosen, by the sizes in the metadata.
    """

    def number(key: str) -> int | None:
        text = metadata(f"{metadata('general.architecture')}.{key}")
        return int(text) if text is not None and text.isdigit() else None

    n_experts, n_used = number("expert_count"), number("expert_used_count")
    width, n_layers = number("embedding_length"), number("block_count")
    inner = number("expert_feed_forward_length") or number("feed_forward_length")
    if not (n_experts and n_used and width and n_layers and inner):
        return None
    n_mixed = (n_layers - (number("leading_dense_block_count") or 0)) // (
        number("interleave_moe_layer_step") or 1
    )
    active = n_parameters - 3 * width * inner * (n_experts - n_used) * n_mixed
    return active if 0 < active < n_parameters else None


def try_memory(model: LlamaModel, context: Context) -> MemoryFacts:
    """Try the KV cache of a model with no rows, which is emptied before and afterwards."""
    tokens = np.ones(N_READ + N_DRAFTED, dtype=np.int32)
    try:
        first = _held_bytes(model, context, tokens[:1])
        all_read = _held_bytes(model, context, tokens[:N_READ])
        per_token = (all_read - first) / (N_READ - 1)
        if model.max_scored > N_DRAFTED:  # draft tokens are verified at once
            model.forward(ForwardRequest(TARGET, tokens, N_DRAFTED + 1), _ROW)
        else:  # they are drafted one by one
            for n in range(N_READ + 1, len(tokens) + 1):
                model.forward(ForwardRequest(TARGET, tokens[:n]), _ROW)
        turned = tokens.copy()
        turned[-N_REJECTED:] = 0
        (n_kept,) = model.prepare([(_ROW, ForwardRequest(TARGET, turned), 0)])
        cache = context.cache
        snapshot_bytes, snapshot_seconds = (
            cache.time_checkpoint() if isinstance(cache, RecurrentCache) else (0, 0.0)
        )
        return MemoryFacts(
            bytes_per_token=per_token,
            fixed_bytes=max(0, round(first - per_token)),
            n_right=len(tokens) - N_REJECTED,
            n_kept=n_kept if isinstance(n_kept, int) else 0,
            snapshot_bytes=snapshot_bytes,
            snapshot_seconds=snapshot_seconds,
        )
    finally:
        model.forget()
        model.release(_ROW)


def _held_bytes(model: LlamaModel, context: Context, tokens: TokenArray) -> int:
    model.forget()
    model.forward(ForwardRequest(TARGET, tokens), _ROW)
    return int(lib.llama_state_seq_get_size(context.pointer, context.cache.sequence(_ROW).number))
