"""Drafters may be plain functions or coroutines; here both become coroutines."""

from __future__ import annotations

from llamaspec.protocols import Drafter, Drafting, Preparing, RowLength
from llamaspec.values import Draft, TokenArray


def drafting(drafter: Drafter, context: TokenArray, length: RowLength) -> Drafting:
    """What a drafter proposes."""
    proposed = drafter.propose(context, length)
    return proposed if isinstance(proposed, Draft) else (yield from proposed)


def preparing(drafter: Drafter, context: TokenArray) -> Preparing:
    """A drafter's preparation for a prompt."""
    prepared = drafter.prepare(context)
    if prepared is not None:
        yield from prepared
