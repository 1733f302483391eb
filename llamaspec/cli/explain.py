"""Why the automatic length drafted as it did, told in plain words and small tables on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from llamaspec.measure.reasons import Reasons


def verdict(reasons: Reasons) -> str:
    """One sentence: does drafting pay here?"""
    if reasons.acceptance is None:
        pays = reasons.gained_seconds > 0
        return f"looking draft tokens up in earlier text {'pays' if pays else 'does not pay'} in this text"
    if reasons.break_even_acceptance is None and not reasons.break_even_is_known:
        return "whether drafting pays here is not known yet: too little has been timed; llamaspec probe tells"
    if reasons.break_even_acceptance is None:
        return "drafting does not pay on this machine for this pair, at any acceptance"
    pays = reasons.acceptance > reasons.break_even_acceptance
    return (
        f"drafting {'pays' if pays else 'does not pay'} here now: it needs an acceptance of "
        f"{reasons.break_even_acceptance:.2f}, the next draft token has {reasons.acceptance:.2f}"
    )


def explain(reasons: Reasons, console: Console, exact_widths: frozenset[int] | None = None) -> None:
    """Print the choices, the costs, the acceptance probabilities, the prediction and the verdict."""
    n_rounds = sum(count.n_rounds for count in reasons.lengths) or 1
    console.print("draft tokens per round: " + ", ".join(
        f"{count.n_draft} in {count.n_rounds / n_rounds:.0%}" for count in reasons.lengths
    ))  # fmt: skip
    if exact_widths is not None:
        console.print("bit-identical widths: " + ", ".join(str(width) for width in sorted(exact_widths)))
    console.print(_cost_table(reasons))
    console.print(f"overhead of a round: {1e3 * reasons.overhead_seconds:.2f} ms")
    if reasons.acceptance is not None:
        console.print(f"a draft token costs {1e3 * reasons.draft_step_seconds:.2f} ms")
        console.print(_confidence_table(reasons))
    if reasons.n_ngram_verified:
        share = reasons.n_ngram_accepted / reasons.n_ngram_verified
        console.print(
            f"looked up in earlier text: {reasons.n_ngram_accepted} of {reasons.n_ngram_verified} verified "
            f"draft tokens accepted ({share:.0%})"
        )
    predicted, measured = reasons.predicted_tokens_per_second, reasons.measured_tokens_per_second
    if predicted is not None and measured is not None:
        console.print(
            f"speed: predicted {predicted:.1f} tokens/s for the rounds that happened, measured {measured:.1f}"
        )
    gained = reasons.gained_seconds
    console.print(
        f"against plain decoding: {abs(gained):.2f} s {'won' if gained >= 0 else 'lost'}; "
        f"{reasons.explored_seconds:.2f} s spent on {reasons.n_tries} drafts not worth verifying"
    )
    console.print(verdict(reasons))


def _cost_table(reasons: Reasons) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("positions at once", "ms", "rounds timed", "evaluated as"):
        table.add_column(title, justify="right")
    for cost in reasons.widths:
        padded = "" if cost.padded_to == cost.width else str(cost.padded_to)
        table.add_row(str(cost.width), f"{1e3 * cost.seconds:.2f}", str(cost.n_timed), padded)
    return table


def _confidence_table(reasons: Reasons) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("confidence", "verified", "accepted", "estimated"):
        table.add_column(title, justify="right")
    for group in reasons.bins:
        rate = group.acceptance_rate
        table.add_row(
            f"{group.low:.1f}-{group.high:.1f}",
            str(group.n_judged),
            "" if rate is None else f"{rate:.0%}",
            f"{group.believed:.0%}",
        )
    return table
