"""Which rows have room in the KV cache: no row reserves what it may come to need.

A row begins when there is room for its prompt and some text. Where the cache runs full, the rows that came
last pause and leave their room to the others; later they read their own text again. So no row is cut short
because of others. tests/serve/test_load.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamaspec.serve.answers import Run
from llamaspec.serve.settings import PADDING

SOME_TEXT = 256  # tokens for which there must be room before a row begins or goes on


@dataclass(frozen=True, slots=True)
class Room:
    """The room of a KV cache."""

    n_cells: int  # tokens that it holds
    context_size: int  # the longest text, in tokens

    def is_there_for(self, run: Run, running: Sequence[Run]) -> bool:
        """Whether a row may begin beside others; alone it always may."""
        taken = sum(map(_n_cells, running))
        return not running or taken + _n_cells(run) + self._some_text(run) <= self.n_cells

    def share_out(self, running: Sequence[Run]) -> None:
        """Let rows pause for which there is no room, and go on where there is room again.

        Who came first goes first, but who does not read what is there comes after all others.
        """
        taken, is_full = 0, False
        for run in sorted(running, key=lambda run: run.is_clogged):
            if run.stream is None:
                continue
            more = self._some_text(run) if run.stream.is_paused else 0
            is_full |= taken > 0 and taken + _n_cells(run) + more > self.n_cells
            if is_full:
                run.stream.pause()
            else:
                run.stream.go_on()
            taken += _n_cells(run)

    def _some_text(self, run: Run) -> int:
        """Tokens that a row should be able to add, so that it does not pause at once."""
        longest = min(len(run.job.prompt) + run.job.max_tokens, self.context_size)
        return max(0, min(SOME_TEXT, longest + PADDING - _n_cells(run)))


def _n_cells(run: Run) -> int:
    """Tokens that the KV cache must hold for the next evaluation of a row, with its draft and padding."""
    return PADDING + (len(run.job.prompt) if run.stream is None else run.stream.n_cells)
