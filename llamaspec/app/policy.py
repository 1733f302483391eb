"""From the command line to how many tokens are guessed."""

from __future__ import annotations

from typing import Any

import click

from llamaspec.app.curves import store_experience, stored, stored_experience
from llamaspec.app.identity import exact_widths
from llamaspec.app.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.rules.auto_length import AutoLength
from llamaspec.rules.lengths import FixedLength

WORTH_KEEPING = 64  # tokens


def make_policy(pair: Pair, options: dict[str, Any]) -> LengthPolicy:
    """A fresh policy for one text, with what runs and a probe have found for this pair, if anything.

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
    prior = stored_experience(pair) or (known.curve if known is not None else None)
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


def keep_experience(pair: Pair, policy: LengthPolicy) -> None:
    """Keep what a run has learnt about this pair, if it was long enough to learn something."""
    if isinstance(policy, AutoLength) and policy.n_tokens >= WORTH_KEEPING:
        store_experience(pair, policy.experience())
