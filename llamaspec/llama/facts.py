"""What a loaded model is, and what its memory does: measured where that is possible, not looked up by name.

The memory is tried as a round uses it: some tokens are read, some guesses are evaluated, and then a sequence
is asked that differs from the last of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.llama.memory import LaneMemory
from llamaspec.values import Ask, TokenArray

Metadata = Callable[[str], str | None]  # key -> value as text
Read = Callable[[TokenArray, int], None]  # evaluate a sequence and score its last n tokens

N_READ, N_GUESSES = 16, 4  # tokens of the trial
N_WRONG = 2  # the last guesses that the trial takes back


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the weights are."""

    architecture: str
    n_parameters: int
    n_active_parameters: int | None  # used for one token, roughly; None where all of them are
    weights_bytes: int
    window: int | None  # positions that some layers look back; None = all layers see everything
    keeps_states: bool  # some layers remember a state
    keeps_positions: bool  # some layers remember keys and values

    @property
    def n_computing(self) -> int:
        """Parameters that one token costs."""
        return self.n_active_parameters or self.n_parameters


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What the memory needs, and what is left of it when the last guesses are taken back."""

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


def try_memory(context: Any, memory: LaneMemory, read: Read, most_scored: int) -> MemoryFacts:
    """Try the memory of lane 0, which is emptied before and afterwards."""
    tokens = np.ones(N_READ + N_GUESSES, dtype=np.int32)
    try:
        first = _held_bytes(context, memory, read, tokens[:1])
        all_read = _held_bytes(context, memory, read, tokens[:N_READ])
        per_token = (all_read - first) / (N_READ - 1)
        if most_scored > N_GUESSES:  # guesses are judged at once
            read(tokens, N_GUESSES + 1)
        else:  # guesses are made one by one
            for n in range(N_READ + 1, len(tokens) + 1):
                read(tokens[:n], 1)
        turned = tokens.copy()
        turned[-N_WRONG:] = 0
        n_kept = memory.keep([Ask(0, turned, 1)])[0]
        snapshot_bytes, snapshot_seconds = memory.try_snapshot()
        return MemoryFacts(
            bytes_per_token=per_token,
            fixed_bytes=max(0, round(first - per_token)),
            n_right=len(tokens) - N_WRONG,
            n_kept=n_kept,
            snapshot_bytes=snapshot_bytes,
            snapshot_seconds=snapshot_seconds,
        )
    finally:
        memory.clear()


def _held_bytes(context: Any, memory: LaneMemory, read: Read, tokens: TokenArray) -> int:
    memory.clear()
    read(tokens, 1)
    return int(lib.llama_state_seq_get_size(context, 0))
