"""How results are told: JSON for scripts, a few lines for people."""

from __future__ import annotations

from typing import Any, Literal

import click

from llamaspec.cli.option_groups import Decorator
from llamaspec.engine.events import Completion
from llamaspec.pair import Pair
from llamaspec.values import MTP

Detail = Literal["short", "full"]
TELLING = 16  # tokens of a text whose speed, next to its own plain rounds, is more than noise


def statistics_options(default: Detail | None, help_text: str) -> tuple[Decorator, ...]:
    """--stats and --no-stats, as `stats` and `no_stats`; see `chosen_detail`."""
    shown = "none" if default is None else default
    return (
        click.option(
            "--stats", type=click.Choice(["short", "full"]), is_flag=False, flag_value="short",
            metavar="[short|full]", help=f"{help_text}; alone: short. Default: {shown}."
        ),
        click.option("--no-stats", is_flag=True, help="No statistics."),
    )  # fmt: skip


def chosen_detail(stats: Detail | None, no_stats: bool, default: Detail | None) -> Detail | None:
    """How much a person wants to read; None = nothing.

    Raises
    ------
    ValueError
        Both options are given.
    """
    if stats is not None and no_stats:
        raise ValueError("--stats and --no-stats contradict each other; drop one")
    return None if no_stats else stats or default


def completion_json(completion: Completion, pair: Pair, seed: int, rule: str) -> dict[str, Any]:
    """What `generate --json` prints; the names are a contract with scripts."""
    return {
        "text": completion.text,
        "tokens": list(completion.tokens),
        "prompt_tokens": completion.n_prompt_tokens,
        "stop_reason": completion.stop_reason.value,
        "seed": seed,
        "rule": rule,
        "target": str(pair.target.path),
        "draft": _drafter(pair),
        "draft_models": [str(model.path) for model in pair.draft_models],
        "statistics": _statistics_json(completion, pair.load_seconds),
    }


def _drafter(pair: Pair) -> str | None:
    """The file of the draft; "mtp" where the target's own file drafts."""
    if pair.heads is not None:
        return MTP if pair.heads.path == pair.target.path else str(pair.heads.path)
    return str(pair.draft.path) if pair.draft is not None else None


def _statistics_json(completion: Completion, load_seconds: float) -> dict[str, Any]:
    summary = completion.summary
    return {
        "rounds": summary.n_rounds,
        "rounds_without_guesses": summary.n_rounds_without_draft,
        "drafted": summary.n_drafted,
        "verified": summary.n_verified,
        "accepted": summary.n_accepted,
        "acceptance_rate": summary.acceptance_rate,
        "accepted_histogram": list(summary.accepted_histogram),
        "mean_tokens_per_round": summary.mean_tokens_per_round,
        "tokens_per_second": summary.tokens_per_second,
        "seconds": {
            "load": load_seconds,
            "prefill": completion.prefill_seconds,
            "draft": summary.draft_seconds,
            "verify": summary.verify_seconds,
            "rest": summary.overhead_seconds,
            "decode": summary.decode_seconds,
            "mask": completion.mask_seconds,
        },
    }


def statistics_lines(completion: Completion, seed: int, detail: Detail) -> list[str]:
    """The few lines after a text."""
    return full_statistics(completion, seed) if detail == "full" else _short_statistics(completion, seed)


def _short_statistics(completion: Completion, seed: int) -> list[str]:
    """What drafts gained and where tokens came from, without the field's terms."""
    summary = completion.summary
    speed = f"{summary.n_tokens} tokens in {summary.decode_seconds:.2f} s"
    if summary.tokens_per_second:
        speed += f", {summary.tokens_per_second:.1f} tokens/s"
    if summary.speed_up is not None and summary.n_tokens >= TELLING:
        digits = 1 if summary.speed_up >= 1 else 2
        speed += f": {summary.speed_up:.{digits}f} times as fast as without a draft"
    n_vain = summary.n_drafted - summary.n_accepted
    source = (
        f"{summary.n_accepted} of them came from drafts, {n_vain} more were drafted in vain"
        if summary.n_drafted
        else "nothing was drafted"
    )
    prompt = f"the prompt took {completion.prefill_seconds:.2f} s"
    return [speed, f"{source}; {prompt}; stopped by {completion.stop_reason.value}, seed {seed}"]


def full_statistics(completion: Completion, seed: int) -> list[str]:
    """The same in the field's terms, with where the time went."""
    summary = completion.summary
    lines = [
        f"{summary.n_tokens} tokens in {summary.decode_seconds:.2f} s"
        + (f", {summary.tokens_per_second:.1f} tokens/s" if summary.tokens_per_second else "")
        + f" (prompt: {completion.n_prompt_tokens} tokens"
        + (f", {completion.n_cached} of them cached," if completion.n_cached else "")
        + f" in {completion.prefill_seconds:.2f} s)"
        + f", stopped by {completion.stop_reason.value}, seed {seed}"
    ]
    if summary.speed_up is not None and summary.plain_seconds and summary.n_tokens >= TELLING:
        lines.append(
            f"{summary.speed_up:.2f} times as fast as without a draft: "
            f"{1e3 * summary.plain_seconds:.1f} ms a token where none was drafted in this text"
        )
    n_dropped = summary.n_drafted - summary.n_verified
    dropped = f", {n_dropped} dropped before verification" if n_dropped else ""
    if summary.acceptance_rate is not None:
        lines.append(
            f"{summary.n_accepted} of {summary.n_verified} draft tokens accepted "
            f"({summary.acceptance_rate:.0%}){dropped}, {summary.mean_tokens_per_round:.2f} tokens per round"
        )
    else:
        lines.append(f"no draft tokens verified{dropped}")
    if summary.decode_seconds > 0:
        parts = [
            ("draft", summary.draft_seconds),
            ("verify", summary.verify_seconds),
            ("overhead", summary.overhead_seconds),
        ]
        if completion.mask_seconds:
            parts.append(("of these, for the constraint", completion.mask_seconds))
        shares = (f"{name} {seconds / summary.decode_seconds:.1%}" for name, seconds in parts)
        lines.append("time: " + ", ".join(shares))
    return lines
