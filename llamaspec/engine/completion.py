"""The result of a completion: its text, why it ended, and what its rounds cost and gained.

tests/engine/test_statistics.py.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from llamaspec.values import Round, UnusedDraft

MIN_TIMED_TOKENS = 16  # the speed-up of fewer tokens is noise
MIN_PLAIN_SECONDS = 0.003  # so is that of a target whose plain rounds are shorter


class StopReason(str, Enum):
    """Why a completion ended."""

    END = "end"  # an end-of-text token
    LIMIT = "limit"  # the maximum number of tokens
    STOP = "stop"  # a stop string
    CONTEXT = "context"  # the context is full
    CONSTRAINT = "constraint"  # the constraint is not satisfied, but allows no further token
    INTERRUPT = "interrupt"  # the reader stopped, or the pair was closed


@dataclass(frozen=True, slots=True)
class Summary:
    """Costs and gains of a completion, summed over its rounds."""

    n_tokens: int  # tokens of the completion, end-of-text token included
    n_rounds: int
    n_rounds_without_draft: int
    n_drafted: int  # draft tokens, including those that were not verified
    n_verified: int  # draft tokens that the target evaluated
    n_accepted: int  # accepted draft tokens, without the target's own token of each round
    accepted_histogram: tuple[int, ...]  # [i] = rounds in which i draft tokens were accepted
    draft_seconds: float
    verify_seconds: float
    overhead_seconds: float
    plain_seconds: float | None = None  # estimate for a round of one sequence without a draft
    speed_up: float | None = None  # estimate, compared with plain decoding; see `_speed_up`

    @property
    def decode_seconds(self) -> float:
        """Seconds of all rounds, without prompt processing."""
        return self.draft_seconds + self.verify_seconds + self.overhead_seconds

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens divided by verified ones; None if none was verified."""
        return self.n_accepted / self.n_verified if self.n_verified else None

    @property
    def mean_tokens_per_round(self) -> float | None:
        """Accepted draft tokens plus the target's own, averaged over all rounds."""
        return (self.n_accepted + self.n_rounds) / self.n_rounds if self.n_rounds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the completion divided by `decode_seconds`."""
        return self.n_tokens / self.decode_seconds if self.decode_seconds > 0 else None


def summarize(rounds: Sequence[Round], n_tokens: int) -> Summary:
    """Sum up the rounds of a completion of `n_tokens` tokens, end-of-text token included."""
    counts = Counter(round_.n_accepted for round_ in rounds)
    plain_seconds = _plain_seconds(rounds)
    return Summary(
        n_tokens=n_tokens,
        n_rounds=len(rounds),
        n_rounds_without_draft=sum(round_.n_drafted == 0 for round_ in rounds),
        n_drafted=sum(round_.n_drafted for round_ in rounds),
        n_verified=sum(round_.n_verified for round_ in rounds),
        n_accepted=sum(round_.n_accepted for round_ in rounds),
        accepted_histogram=tuple(counts[i] for i in range(max(counts, default=-1) + 1)),
        draft_seconds=sum(round_.draft_seconds for round_ in rounds),
        verify_seconds=sum(round_.verify_seconds for round_ in rounds),
        overhead_seconds=sum(round_.overhead_seconds for round_ in rounds),
        plain_seconds=plain_seconds.get(1),
        speed_up=_speed_up(rounds, plain_seconds),
    )


def _plain_seconds(rounds: Sequence[Round]) -> dict[int, float]:
    """Return the seconds of a round without a draft, by the number of sequences that share its evaluation.

    They are the latest estimate of the length policy for the evaluation, and the usual overhead. Without an
    estimate, they are the median of these rounds if at least three had no draft: a single one may have been
    delayed.
    """
    measured = _measured_plain_seconds(rounds)
    known = {} if measured is None else {1: measured}
    undrafted = [each for each in rounds if not each.n_drafted] or rounds
    overhead = statistics.median(each.overhead_seconds for each in undrafted) if rounds else 0.0
    return known | {
        each.n_sequences: each.plain_seconds + overhead for each in rounds if each.plain_seconds is not None
    }


def _measured_plain_seconds(rounds: Sequence[Round]) -> float | None:
    """Return the median seconds of a round of one sequence without a draft; None if fewer than three were."""
    plain = [each.seconds - each.draft_seconds for each in rounds if each.width == 1]
    return statistics.median(plain) if len(plain) >= 3 else None


def _speed_up(rounds: Sequence[Round], plain_seconds: Mapping[int, float]) -> float | None:
    """Return how many times as fast as plain decoding the rounds were.

    None if nothing was verified, if there are fewer than `MIN_TIMED_TOKENS`, if no plain round was timed, or
    if one takes less than `MIN_PLAIN_SECONDS`. None, too, if the estimate is wrong for this completion's own
    plain rounds by more than drafts have changed.

    Seconds in which the machine seems to have stood still do not count, nor rounds that shared their
    evaluation with a prompt, because their own share is unknown. A round never costs less than a plain one,
    so tokens per round is an upper bound.
    """
    rounds = [round_ for round_ in rounds if not round_.verified_in.n_prefill]
    seconds = sum(round_.seconds - round_.stalled_seconds for round_ in rounds)
    is_known = all(round_.n_sequences in plain_seconds for round_ in rounds)
    n_tokens = sum(round_.n_accepted + 1 for round_ in rounds)
    if n_tokens < MIN_TIMED_TOKENS or not (
        is_known and seconds and any(round_.n_verified for round_ in rounds)
    ):
        return None
    if min(plain_seconds.values()) < MIN_PLAIN_SECONDS:
        return None
    plain = sum((round_.n_accepted + 1) * plain_seconds[round_.n_sequences] for round_ in rounds)
    speed_up = min(plain / seconds, n_tokens / len(rounds))
    measured = _measured_plain_seconds(rounds)
    error = 0.0 if measured is None else abs(measured / plain_seconds[1] - 1)
    return speed_up if abs(speed_up - 1) >= error else None


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A completion, finished or as far as it was read."""

    text: str
    tokens: tuple[int, ...]  # without the end-of-text token
    n_prompt_tokens: int
    stop_reason: StopReason
    rounds: tuple[Round, ...]
    summary: Summary
    prefill_seconds: float  # prompt processing by target and draft
    n_cached: int = 0  # prompt tokens that the target's KV cache already held
    unused_draft: UnusedDraft | None = None  # why the draft was never used
    draft_fault: str | None = None  # the error after which the draft was no longer used
    mask_seconds: float = 0.0  # time to compute allowed tokens; part of draft and overhead seconds
