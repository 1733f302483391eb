"""From the command line to how many tokens are guessed."""

from __future__ import annotations

from typing import Any

import click

from llamaspec.app.curves import stored
from llamaspec.app.identity import exact_widths
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
    widths = known.identical_widths if known is not None else exact_widths(pair)
    if widths == {1}:
        click.echo(
            "llamaspec: --exact: no wider batch is sure to be bit-identical here, decoding plainly; on a CPU "
            "--cache-type-v bf16 may help, after llamaspec probe",
            err=True,
        )
    return AutoLength(prior, widths)
