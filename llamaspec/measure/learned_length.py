"""The automatic length for a pair on this machine, which begins with what a probe or earlier runs found."""

from __future__ import annotations

from collections.abc import Callable

from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.measure.probe import exact_widths
from llamaspec.measure.store import store_prior, stored_prior, stored_probe
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.sequence_drafters import CascadeLevel

WORTH_KEEPING = 64  # tokens

Tell = Callable[[str], None]  # receives a remark for the person


def auto_length(pair: Pair, widths: frozenset[int] | None = None, tell: Tell | None = None) -> AutoLength:
    """A fresh policy; with `widths` it allows no others. `tell` hears of stored files that are damaged.

    The pair's drafts that have drafts get one, too.
    """
    for level in pair.cascade:
        level.length = _begun(level, None, tell)
    return _begun(pair, widths, tell)


def _begun(pair: Pair | CascadeLevel, widths: frozenset[int] | None, tell: Tell | None) -> AutoLength:
    kept = stored_prior(pair)
    if kept.fault is not None and tell is not None:
        tell(kept.fault)
    return AutoLength(kept.value, widths, sources=pair.sources)


def known_exact_widths(pair: Pair) -> frozenset[int]:
    """Batch widths that are bit-identical with width 1: as a probe has found, or found now."""
    known = stored_probe(pair).value
    return known.identical_widths if known is not None else exact_widths(pair)


def learned_costs(policy: AutoLength) -> CostCurve | None:
    """What a policy knows of this pair's costs."""
    return policy.experience().curve


def keep_prior(pair: Pair | CascadeLevel, policy: LengthPolicy) -> None:
    """Keep what a run has learnt about this pair, if it was long enough to learn something."""
    if isinstance(policy, AutoLength) and policy.shared.n_tokens >= WORTH_KEEPING:
        store_prior(pair, policy.experience())
    if isinstance(pair, Pair):
        for level in pair.cascade:
            keep_prior(level, level.length)
