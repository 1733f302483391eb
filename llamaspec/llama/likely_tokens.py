"""The tokens that a draft model scores: those that are likely to come next in a text.

The output matrix is a third of what a small draft model reads for a token, or more, and a text uses few of
its rows. So our kernels compute only these: the first rows, because vocabularies are numbered by frequency;
the last ones, where many have their control tokens; and all tokens of the sequence so far. Nothing else
decides, so the draft of a sequence depends on no other text. tests/llama/test_likely_tokens.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamaspec.kernels import PANEL
from llamaspec.values import TokenArray

N_FIRST, N_LAST = 32768, 512  # rows that are always computed; of smaller vocabularies than twice these, all


@dataclass(frozen=True, slots=True)
class LikelyTokens:
    """The likely tokens of a vocabulary, in panels of rows of the output matrix."""

    n_rows: int  # V
    always: npt.NDArray[np.bool_]  # [panels]

    @classmethod
    def of(cls, n_rows: int, eos: int) -> LikelyTokens | None:
        """Return those of a vocabulary with an end-of-text token, -1 = none; None if it is small."""
        if n_rows <= 2 * (N_FIRST + N_LAST):
            return None
        always = np.zeros(-(-n_rows // PANEL), dtype=np.bool_)
        always[: N_FIRST // PANEL] = always[-(N_LAST // PANEL) :] = True
        always[eos // PANEL] = True
        return cls(n_rows, always)

    def panels(self, sequences: Iterable[TokenArray]) -> npt.NDArray[np.int32]:
        """Return the panels of the tokens that are likely after some sequences: int32, ascending."""
        likely = self.always.copy()
        for tokens in sequences:
            likely[tokens // PANEL] = True
        return np.flatnonzero(likely).astype(np.int32)
