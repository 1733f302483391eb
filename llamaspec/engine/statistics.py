"""Costs and gains of a completion, summed over its rounds. Every rate is a property with its definition.

The seconds come with the rounds.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from llamaspec.values import Round


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums over the rounds of one completion."""

    n_tokens: int  # tokens that the completion kept, end-of-text token included
    n_rounds: int
    n_rounds_without_draft: int
    n_rounds_cut: int  # rounds that the end of the completion cut short
    n_drafted: int  # draft tokens, including those that were dropped before verification
    n_verified: int  # draft tokens that the target evaluated
    n_accepted: int  # accepted draft tokens; the target's own token of each round does not count
    accepted_histogram: tuple[int, ...]  # [i] = rounds in which i draft tokens were accepted
    draft_seconds: float
    verify_seconds: float
    overhead_seconds: float
    plain_seconds: float | None = (
        None  # median round of one position, without drafting; None if there was none
    )
    plain_excess: float = 0.0  # total seconds of these rounds beyond their median

    @property
    def speed_up(self) -> float | None:
        """Speed relative to plain rounds only; None if no round was drafted, or none was plain.

        Plain rounds count with their median: a delay in one would have come without a draft, too.
        """
        if not (self.plain_seconds and self.n_drafted and self.n_tokens):
            return None
        return self.n_tokens * self.plain_seconds / (self.decode_seconds - self.plain_excess)

    @property
    def decode_seconds(self) -> float:
        """Wall clock of all rounds, without prompt processing."""
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
        """Tokens that the completion kept, divided by `decode_seconds`."""
        return self.n_tokens / self.decode_seconds if self.decode_seconds > 0 else None


def summarize(rounds: Iterable[Round], n_tokens: int) -> Summary:
    """Fold rounds into a summary.

    Parameters
    ----------
    rounds : iterable of Round
        In order; only the last may have been cut.
    n_tokens : int
        Tokens of these rounds that the completion kept.
    """
    rounds = list(rounds)
    counts = Counter(round_.n_accepted for round_ in rounds)
    plain = [r.seconds - r.draft_seconds for r in rounds if r.width == 1 and not r.n_verified]
    median = statistics.median(plain) if plain else None
    n_made = sum(round_.n_accepted + 1 for round_ in rounds)
    return Summary(
        n_tokens=n_tokens,
        n_rounds=len(rounds),
        n_rounds_without_draft=sum(round_.n_drafted == 0 for round_ in rounds),
        n_rounds_cut=int(n_made > n_tokens),
        n_drafted=sum(round_.n_drafted for round_ in rounds),
        n_verified=sum(round_.n_verified for round_ in rounds),
        n_accepted=sum(round_.n_accepted for round_ in rounds),
        accepted_histogram=tuple(counts[i] for i in range(max(counts, default=-1) + 1)),
        draft_seconds=sum(round_.draft_seconds for round_ in rounds),
        verify_seconds=sum(round_.verify_seconds for round_ in rounds),
        overhead_seconds=sum(round_.overhead_seconds for round_ in rounds),
        plain_seconds=median,
        plain_excess=sum(plain) - len(plain) * (median or 0.0),
    )
