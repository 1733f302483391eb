"""From the command line to how many tokens are guessed."""

from __future__ import annotations

from typing import Any

from llamaspec.app.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.rules.lengths import AutoLength, FixedLength


def make_policy(pair: Pair, options: dict[str, Any]) -> LengthPolicy:
    """A fresh policy for one text.

    Raises
    ------
    ValueError
        --exact together with a fixed number of guesses.
    """
    if options["draft_length"] is not None:
        if options["exact"] and options["draft_length"] > 0:
            raise ValueError("--exact chooses how many tokens to guess by itself; drop --draft-length")
        return FixedLength(options["draft_length"])
    return AutoLength()
