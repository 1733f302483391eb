"""What a trial of a model's memory shows."""

from __future__ import annotations

from dataclasses import dataclass


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
