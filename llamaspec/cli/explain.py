"""What drafting cost and gained in a text, told in plain words and small tables on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from llamaspec.measure.reasons import Reasons


def verdict(reasons: Reasons) -> str:
    """One sentence: did drafting pay, and what decides it?"""
    if reasons.break_even_acceptance is not None:
        needed = f"at these costs it needs an acceptance of {reasons.break_even_acceptance:.2f}"
    elif reasons.is_conclusive:
        needed = "at these costs it never does, at any acceptance"
    else:
        needed = "which acceptance it needs is not known yet: too little was timed; llamaspec probe tells"
    if not reasons.n_judged and not reasons.n_copies_judged:
        return f"no draft token was verified, so drafting gained nothing in this text; {needed}"
    if reasons.gained_seconds is None:
        return f"whether drafting paid in this text is not known: there was no plain round; {needed}"
    paid = "paid" if reasons.gained_seconds > 0 else "did not pay"
    if reasons.acceptance is None:
        return f"looking draft tokens up in earlier text {paid} in this text"
    return f"drafting {paid} in this text: {needed}, verified draft tokens had {reasons.acceptance:.2f}"


def explain(reasons: Reasons, console: Console) -> None:
    """Print the choices, the costs, the acceptance, what was gained and the verdict."""
    n_rounds = sum(count.n_rounds for count in reasons.lengths) or 1
    console.print("verified draft tokens per round: " + ", ".join(
        f"{count.n_draft} in {count.n_rounds / n_rounds:.0%}" for count in reasons.lengths
    ))  # fmt: skip
    console.print(_cost_table(reasons))
    console.print(f"overhead of a round: {1e3 * reasons.overhead_seconds:.2f} ms")
    if reasons.draft_step_seconds:
        console.print(f"a draft token costs {1e3 * reasons.draft_step_seconds:.2f} ms")
    if reasons.n_judged:
        console.print(_confidence_table(reasons))
    if reasons.n_copies_judged:
        share = reasons.n_copies_accepted / reasons.n_copies_judged
        console.print(
            f"looked up in earlier text: {reasons.n_copies_accepted} of {reasons.n_copies_judged} verified "
            f"draft tokens accepted ({share:.0%})"
        )
    gained = reasons.gained_seconds
    if gained is not None:
        console.print(f"against plain decoding: {abs(gained):.2f} s {'saved' if gained >= 0 else 'lost'}")
    if reasons.n_unverified:
        console.print(
            f"{reasons.n_unverified} drafts were not worth verifying: {reasons.unverified_seconds:.2f} s"
        )
    console.print(verdict(reasons))


def _cost_table(reasons: Reasons) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("positions at once", "ms", "rounds timed"):
        table.add_column(title, justify="right")
    for cost in reasons.widths:
        table.add_row(str(cost.width), f"{1e3 * cost.seconds:.2f}", str(cost.n_timed))
    return table


def _confidence_table(reasons: Reasons) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("confidence", "verified", "accepted"):
        table.add_column(title, justify="right")
    for group in reasons.bins:
        rate = f"{group.n_accepted / group.n_judged:.0%}" if group.n_judged else ""
        table.add_row(f"{group.low:.1f}-{group.high:.1f}", str(group.n_judged), rate)
    return table
