"""Rounds and completions with known figures."""

from __future__ import annotations

from collections.abc import Sequence

from llamaspec.engine.completion import Completion, StopReason, summarize
from llamaspec.values import Distribution, Draft, Evaluation, Round, Source


def a_round(
    drafted: Sequence[int] = (),
    accepted: int = 0,
    next_token: int = 9,
    seconds: tuple[float, float, float] = (0.25, 0.5, 0.25),
    source: Source = Source.MODEL,
) -> Round:
    """Return a round whose first `accepted` draft tokens were accepted.

    `seconds` are those of draft, target and overhead.
    """
    confidences = tuple(0.5 + 0.1 * i for i in range(len(drafted)))
    distributions = tuple(Distribution.certain(token) for token in drafted)
    made = Draft.certain(list(drafted))
    draft = Draft(made.tokens, distributions, confidences, source)
    draft_seconds, verify_seconds, overhead_seconds = seconds
    return Round(
        draft, accepted, next_token, Evaluation(len(drafted) + 1), draft_seconds=draft_seconds,
        verify_seconds=verify_seconds, overhead_seconds=overhead_seconds,
    )  # fmt: skip


def a_text(rounds: Sequence[Round], n_cached: int = 0, prefill_seconds: float = 0.125) -> Completion:
    """Return the completion of some rounds."""
    tokens = tuple(int(token) for round_ in rounds for token in round_.tokens)
    return Completion(
        text="", tokens=tokens, n_prompt_tokens=40, stop_reason=StopReason.LIMIT, rounds=tuple(rounds),
        summary=summarize(rounds, len(tokens)), prefill_seconds=prefill_seconds, n_cached=n_cached,
    )  # fmt: skip


def taking(seconds: float, tokens: Sequence[int] = (1, 2, 3, 4)) -> Completion:
    """Return a completion of some tokens by plain decoding in some seconds."""
    each = (0.0, seconds / len(tokens), 0.0)
    return a_text([a_round(next_token=token, seconds=each) for token in tokens])
