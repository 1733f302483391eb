"""How results are told: JSON for scripts, a few lines for people."""

from __future__ import annotations

from typing import Any

from llamaspec.engine.events import Completion
from llamaspec.pair import Pair
from llamaspec.values import MTP


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
        },
    }


def statistics_lines(completion: Completion, seed: int) -> list[str]:
    """The few lines after a text."""
    summary = completion.summary
    lines = [
        f"{summary.n_tokens} tokens in {summary.decode_seconds:.2f} s"
        + (f", {summary.tokens_per_second:.1f} tokens/s" if summary.tokens_per_second else "")
        + f" (prompt: {completion.n_prompt_tokens} tokens"
        + (f", {completion.n_cached} of them cached," if completion.n_cached else "")
        + f" in {completion.prefill_seconds:.2f} s)"
        + f", stopped by {completion.stop_reason.value}, seed {seed}"
    ]
    if summary.speed_up is not None and summary.plain_seconds is not None:
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
        shares = (
            f"{name} {seconds / summary.decode_seconds:.1%}"
            for name, seconds in (
                ("draft", summary.draft_seconds),
                ("verify", summary.verify_seconds),
                ("overhead", summary.overhead_seconds),
            )
        )
        lines.append("time: " + ", ".join(shares))
    return lines
