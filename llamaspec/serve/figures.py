"""Figures in answers: usage as the APIs count it, timings as llama-server names them, and our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamaspec.length.auto_length import AutoLength
from llamaspec.protocols import LengthPolicy
from llamaspec.serve.deltas import End
from llamaspec.values import Round


def openai_usage(ends: Sequence[End], n: int = 1) -> dict[str, Any]:
    """Tokens of all rows of a request; a prompt with `n` choices counts once."""
    firsts = [end.completion for end in ends[::n]]
    n_prompt, n_cached = sum(one.n_prompt_tokens for one in firsts), sum(one.n_cached for one in firsts)
    n_written = sum(end.completion.summary.n_tokens for end in ends)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_written,
        "total_tokens": n_prompt + n_written,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "completion_tokens_details": {"reasoning_tokens": sum(end.n_thought for end in ends)},
    }


def figures(end: End, with_rounds: bool) -> dict[str, Any]:
    """What an answer tells of how it was made."""
    return {"timings": timings(end), **({"rounds": rounds(end)} if with_rounds else {})}


def rounds(end: End) -> list[dict[str, Any]]:
    """Each evaluation of the target for a text, in order."""
    return [
        {
            "draft_ms": 1e3 * round_.draft_seconds,
            "verify_ms": 1e3 * round_.verify_seconds,
            "overhead_ms": 1e3 * round_.overhead_seconds,
            "drafted": round_.n_verified,
            "branches": round_.draft.n_branches,
            "accepted": round_.n_accepted,
            "source": round_.source.value,
            "rows": round_.n_rows,
        }
        for round_ in end.completion.rounds
    ]


def timings(end: End) -> dict[str, Any]:
    """llama-server's timings of one row, and the rounds that made it."""
    done, summary = end.completion, end.completion.summary
    n_read, read_ms = done.n_prompt_tokens - done.n_cached, 1e3 * done.prefill_seconds
    n_written, write_ms = summary.n_tokens, 1e3 * summary.decode_seconds
    return {
        "cache_n": done.n_cached,
        "prompt_n": n_read,
        "prompt_ms": read_ms,
        "prompt_per_token_ms": _ratio(read_ms, n_read),
        "prompt_per_second": _ratio(1e3 * n_read, read_ms),
        "predicted_n": n_written,
        "predicted_ms": write_ms,
        "predicted_per_token_ms": _ratio(write_ms, n_written),
        "predicted_per_second": _ratio(1e3 * n_written, write_ms),
        "draft_n": summary.n_verified,
        "draft_n_accepted": summary.n_accepted,
        "rounds": summary.n_rounds,
        "accepted_histogram": list(summary.accepted_histogram),
        "draft_ms": 1e3 * summary.draft_seconds,
        "verify_ms": 1e3 * summary.verify_seconds,
        "overhead_ms": 1e3 * summary.overhead_seconds,
        "mask_ms": 1e3 * done.mask_seconds,
        "speedup_estimate": end.speedup,
    }


def speedup(rounds: Sequence[Round], policy: LengthPolicy) -> float | None:
    """How many times as fast as plain decoding a text was, by what plain rounds are believed to take.

    Rounds beside which a prompt was read do not count: what they alone would have taken is not known.
    """
    rounds = [round_ for round_ in rounds if not round_.n_beside]
    if not isinstance(policy, AutoLength) or not rounds:
        return None
    believed = [policy.plain_seconds(round_.n_rows) for round_ in rounds]
    seconds = sum(round_.seconds for round_ in rounds)
    plain = sum((round_.n_accepted + 1) * each for round_, each in zip(rounds, believed, strict=True) if each)
    return plain / seconds if seconds > 0 and None not in believed else None


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
