"""What a model needs beside its weights: its states, by the metadata, and what a trial has measured.

tests/llama/test_needed_memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamaspec.llama.gguf_file import GgufFile, kv_row_sizes

STATES_BACK = 8  # earlier states for llama.cpp to keep: (1 + this) times the memory of one
NUMBER_BYTES = 4  # states are f32
_BOTH = {"falcon-h1"}  # architectures whose layers each have attention and a state
_ALONE = {"nemotron_h", "nemotron_h_moe"}  # whose feed-forward networks are layers of their own
_ROLLS_BACK = {  # architectures of which llama.cpp keeps earlier states (llm_arch_supports_rs_rollback)
    "qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe",
}  # fmt: skip


def state_bytes(found: GgufFile) -> int:
    """Return the bytes of the state of all layers together; 0 if none keeps one."""
    per_layer, rows = _state_numbers(found) * NUMBER_BYTES, kv_row_sizes(found)
    n_layers = sum(row == (0, 0) or found.architecture in _BOTH for row in rows)
    n_ffn = found.metadata.get(f"{found.architecture}.feed_forward_length")
    if found.architecture in _ALONE and isinstance(n_ffn, list):
        n_layers -= sum(isinstance(n, int) and n > 0 for n in n_ffn[: len(rows)])
    return per_layer * n_layers if per_layer else 0


def can_restore(found: GgufFile) -> bool:
    """Whether earlier states can be restored. With a sliding window, llama.cpp may have dropped positions."""
    return found.number("attention.sliding_window") <= 0


def n_states(found: GgufFile) -> int:
    """Return how many states llama.cpp keeps in a context."""
    return 1 + STATES_BACK if found.architecture in _ROLLS_BACK and can_restore(found) else 1


def _state_numbers(found: GgufFile) -> int:
    """Return the size of the state of a layer that keeps one, in numbers; 0 = no layer does."""
    width = found.number("embedding_length")
    if head_size := found.number("wkv.head_size"):  # RWKV
        return width * (found.number("token_shift_count", 2) + head_size)
    if length := found.number("shortconv.l_cache"):  # LFM2
        return width * (length - 1)
    n_conv = max(0, found.number("ssm.conv_kernel") - 1)
    if size := found.number("kda.head_dim"):  # Kimi Linear
        n_heads = found.number("attention.head_count")
        return 3 * (n_conv or 3) * n_heads * size + size * size * n_heads
    n_inner, n_state = found.number("ssm.inner_size"), found.number("ssm.state_size")  # Mamba
    return n_conv * (n_inner + 2 * found.number("ssm.group_count") * n_state) + n_state * n_inner


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """The size of the KV cache, and how much of it survived a rejection of draft tokens in a trial."""

    bytes_per_token: float
    fixed_bytes: int  # of states, at any length
    n_right: int  # tokens before the rejected ones
    n_kept: int  # of these, tokens that were still cached
    attention_bytes_per_token: int = 0  # of memory that our attention takes while it evaluates

    @property
    def n_repeated(self) -> int:
        """Number of tokens that were evaluated again."""
        return self.n_right - self.n_kept

    def size(self, n_ctx: int) -> int:
        """Return the bytes of a full context that is evaluated."""
        return self.fixed_bytes + round((self.bytes_per_token + self.attention_bytes_per_token) * n_ctx)
