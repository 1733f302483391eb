"""The tokens that a draft model scores: those that are likely to come next in a text.

The output matrix is a third of what a small draft model reads for a token, or more, and a text uses few of
its rows. So our kernels compute only these: the first rows, because vocabularies are numbered by frequency;
the last ones, where many have their control tokens; and those of the sequence so far. If too many of its last
tokens are not among the first, as in Chinese, all rows are computed. Nothing but the sequence decides, so a
draft does not depend on other texts. tests/llama/test_likely_tokens.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamaspec.kernels import PANEL
from llamaspec.values import TokenArray

N_FIRST, N_LAST = 81920, 512  # rows that are always computed
MOST = 0.65  # maximum share of these of all rows; with more, little is saved
WINDOW, N_RARE = 128, 4  # last tokens of a sequence, and how many panels of theirs may be other ones

Panels = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LikelyTokens:
    """The likely tokens of a vocabulary, in panels of rows of the output matrix."""

    n_rows: int  # V
    always: npt.NDArray[np.bool_] | None  # [panels]; None = a vocabulary that is scored whole

    @classmethod
    def of(cls, n_rows: int, eos: int) -> LikelyTokens:
        """Return those of a vocabulary with an end-of-text token, -1 = none."""
        if MOST * n_rows < N_FIRST + N_LAST:
            return cls(n_rows, None)
        always = np.zeros(-(-n_rows // PANEL), dtype=np.bool_)
        always[: N_FIRST // PANEL] = always[-(N_LAST // PANEL) :] = always[eos // PANEL] = True
        return cls(n_rows, always)

    def panels(self, sequences: Iterable[TokenArray]) -> Panels | None:
        """Return the panels of the tokens that are likely after some sequences, ascending; None = all."""
        if self.always is None:
            return None
        likely = self.always.copy()
        for tokens in sequences:
            used = tokens // PANEL
            last = used[-WINDOW:]
            if len(np.unique(last[~self.always[last]])) > N_RARE:
                return None
            likely[used] = True
        return np.flatnonzero(likely).astype(np.int32)
