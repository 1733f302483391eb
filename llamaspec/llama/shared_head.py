"""A prediction head in a file of its own that reads the target's KV cache and has none: Gemma 4's assistant.

It reads one token at a time: the last of the text with the target's hidden row, then its own draft tokens
with its own rows, all at the position behind what the target has evaluated. So rejected draft tokens must be
out of the target's cache before. tests/llama/test_shared_head.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamaspec.errors import ContextFullError, PairError
from llamaspec.llama.batch import Segment
from llamaspec.llama.cells import Rows
from llamaspec.llama.context import Context
from llamaspec.llama.head import Reading
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.weights import Weights
from llamaspec.values import TARGET, ForwardRequest, Logits


class SharedHead:
    """The head over its own weights and the target's KV cache.

    Parameters
    ----------
    context : Context
        Of the head, over the target's.
    target : LlamaModel
    """

    def __init__(self, context: Context, target: LlamaModel) -> None:
        self.context = context
        self._target = target

    @classmethod
    def over(cls, weights: Weights, target: LlamaModel) -> SharedHead:
        """Open the head for a target.

        Raises
        ------
        PairError
            It was made for another target.
        """
        if weights.hidden_size != target.weights.hidden_size or target.weights.architecture != "gemma4":
            raise PairError(f"{weights.path} drafts for another target than {target.path}; name that")
        return cls(target.context_beside(weights), target)

    def prepare(self, batch: Sequence[Reading]) -> list[int | ContextFullError]:
        """Take rejected draft tokens out of the target's cache; all tokens but the last count as read."""
        return [self._prepared(reading) if reading.n_scored else len(reading.tokens) for reading in batch]

    def evaluate(self, batch: Sequence[Reading]) -> list[tuple[Logits, Rows]]:
        """Logits [1, V] and the hidden row [1, E] behind the last token of each."""
        self.context.decode([self._segment(reading) for reading in batch])
        logits, rows = self.context.logits(len(batch)), self.context.hidden_rows(len(batch))
        return [(logits[i : i + 1], rows[i : i + 1]) for i in range(len(batch))]

    def is_ready(self, reading: Reading) -> bool:
        """Whether what was prepared can still be read: not if the target has forgotten it since."""
        cached = self._target.cached(reading.row)
        return (
            cached is not None
            and cached.n == reading.n_text - 1
            and reading.can_start(len(reading.tokens) - 1)
        )

    def lacks(self, reading: Reading) -> bool:
        """Whether there is something to read."""
        return bool(reading.n_scored)

    def release(self, row: int) -> None:
        """Nothing is kept of a row."""

    def forget(self) -> None:
        """Nothing is kept."""

    def _prepared(self, reading: Reading) -> int | ContextFullError:
        n_read, n_evaluated = len(reading.tokens) - 1, reading.n_text - 1
        if not n_evaluated or not reading.can_start(n_read):
            return ContextFullError("the hidden rows of this text are not known")
        request = ForwardRequest(TARGET, reading.tokens[: reading.n_text])
        (n_cached,) = self._target.prepare([(reading.row, request, 0)])
        if n_cached != n_evaluated:
            return ContextFullError("the target has not cached this text")
        return n_read

    def _segment(self, reading: Reading) -> Segment:
        cached = self._target.cached(reading.row)
        assert cached is not None  # prepared
        rows = reading.rows(len(reading.tokens) - 1)
        return Segment(cached.number, reading.n_text - 1, reading.tokens[-1:], 1, rows)
