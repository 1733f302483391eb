"""The bound for chains of draft tokens: how fast a text could be, if it were known which are accepted.

Whether the draft token at a position is accepted depends on the text before it, not on the round, so one
run that drafts far ahead tells it for nearly all positions. The shortest way through them, at the costs that
were measured, is what no choice of draft lengths can beat with this draft on this machine.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from llamaspec.values import Round

RARE = 3  # times that a number of draft tokens must have been verified, for its cost to be known


def bound_seconds(farthest: Sequence[Round], runs: Sequence[Sequence[Round]]) -> float:
    """Seconds of the best rounds for one text.

    Parameters
    ----------
    farthest : sequence of rounds
        The run that drafted farthest ahead, always equally many tokens.
    runs : sequence of runs
        All runs of the text: they tell what verifying 0, 1, 2, ... draft tokens costs.
    """
    return shortest(standing(farthest), costs(runs))


def standing(rounds: Sequence[Round]) -> list[bool]:
    """For each position of the text, whether its draft token is accepted; where none was drafted, True."""
    found: list[bool] = []
    for round_ in rounds:
        found += [True] * round_.n_accepted
        found.append(round_.n_accepted == round_.n_verified)
    return found


def costs(runs: Sequence[Sequence[Round]]) -> list[float]:
    """Median seconds of a round with 0, 1, 2, ... accepted draft tokens; padded where that is cheaper."""
    verify, step, rest = defaultdict[int, list[float]](list), list[float](), list[float]()
    for rounds in runs:
        for round_ in rounds:
            rest.append(round_.overhead_seconds)
            if round_.draft.is_chain:
                verify[round_.n_verified].append(round_.verify_seconds)
            if len(round_.draft) and round_.draft.is_chain:
                step.append(round_.draft_seconds / len(round_.draft))
    times = {n: statistics.median(seconds) for n, seconds in verify.items() if n == 0 or len(seconds) >= RARE}
    a_step, a_rest = statistics.median(step) if step else 0.0, statistics.median(rest)
    return [
        min(seconds for width, seconds in times.items() if width >= n) + n * a_step + a_rest
        for n in range(max(times) + 1)
    ]


def shortest(stands: Sequence[bool], seconds: Sequence[float]) -> float:
    """The least sum of rounds; a round of n draft tokens makes n + 1 tokens, if all n are accepted."""
    best = [0.0] * (len(stands) + len(seconds))
    for start in range(len(stands) - 1, -1, -1):
        least = float("inf")
        for n, cost in enumerate(seconds):
            least = min(least, cost + best[start + n + 1])
            if start + n < len(stands) and not stands[start + n]:
                break
        best[start] = least
    return best[0]
