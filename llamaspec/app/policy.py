"""From the command line to how many tokens are guessed."""

from __future__ import annotations

from typing import Any

from llamaspec.app.curves import stored
from llamaspec.app.measure import exact_widths
from llamaspec.app.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.rules.lengths import AutoLength, FixedLength


def make_policy(pair: Pair, options: dict[str, Any]) -> LengthPolicy:
    """A fresh policy for one text, with what a probe has found for this pair, if anything.

    Raises
    ------
    ValueError
        --exact together with a fixed number of guesses.
    """
    if options["draft_length"] is not None:
        if options["exact"] and options["draft_length"] > 0:
            raise ValueError("--exact chooses how many tokens to guess by itself; drop --draft-length")
        return FixedLength(options["draft_length"])
    known = stored(pair)
    prior = known.curve if known is not None else None
    if not options["exact"]:
        return AutoLength(prior)
    return AutoLength(prior, known.identical_widths if known is not None else exact_widths(pair))
