"""An ordinary text to measure with, as tokens of any vocabulary.

Ordinary, because a mixture of experts sends random tokens through more of its experts than a text.
"""

from __future__ import annotations

import numpy as np

from llamaspec.protocols import Vocabulary
from llamaspec.values import TokenArray

TEXT = """\
def moving_average(values, size):
    total = sum(values[:size])
    for i in range(size, len(values)):
        yield total / size
        total += values[i] - values[i - size]

The river had risen in the night, and in the morning the lower fields lay under water. Two of the
neighbours came with a boat; they counted the sheep, 114 in all, and brought them up to the old mill.
"Will it hold?" asked the younger. "It held in 1924," said the other, "and the wall was thinner then."

| year | rainfall (mm) | harvest (t) |
| 2019 | 812 | 40.5 |
"""
BYTES_PER_TOKEN = 4  # roughly; a text that is too short for a vocabulary is repeated


def sample_tokens(vocabulary: Vocabulary, n: int) -> TokenArray:
    """The first `n` tokens of the text, said as often as needed: int32 [n]."""
    text = TEXT * (1 + BYTES_PER_TOKEN * n // len(TEXT))
    return np.resize(vocabulary.tokenize(text.encode()), n).astype(np.int32)
