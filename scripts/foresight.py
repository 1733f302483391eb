"""The bound for a chain of guesses: how fast a text could have been, had it been known which guesses stand.

Whether the guess for a position stands depends on the text before it, not on the round that makes it, so one
run that guesses far ahead tells it for nearly all positions. The shortest way through them, at the costs that
were measured, is what no choice of draft lengths can beat with this draft on this machine.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from llamaspec.values import Round

RARE = 3  # times that a number of guesses must have been judged, for its cost to be known


def bound_seconds(farthest: Sequence[Round], runs: Sequence[Sequence[Round]]) -> float:
    """Seconds of the best rounds for one text.

    Parameters
    ----------
    farthest : sequence of rounds
        The run that guessed farthest ahead, always equally many tokens.
    runs : sequence of runs
        All runs of the text: they tell what judging 0, 1, 2, ... guesses costs.
    """
    return shortest(standing(farthest), costs(runs))


def standing(rounds: Sequence[Round]) -> list[bool]:
    """For each position of the text, whether the guess for it stands; where nobody guessed, that it does."""
    found: list[bool] = []
    for round_ in rounds:
        found += [True] * round_.n_accepted
        found.append(round_.n_accepted == round_.n_verified)
    return found


def costs(runs: Sequence[Sequence[Round]]) -> list[float]:
    """Median seconds of a round with 0, 1, 2, ... guesses that all stand; padded where that is cheaper."""
    verify, step, rest = defaultdict[int, list[float]](list), list[float](), list[float]()
    for rounds in runs:
        for round_ in rounds:
            verify[round_.n_verified].append(round_.verify_seconds)
            rest.append(round_.rest_seconds)
            if round_.drafted.size:
                step.append(round_.draft_seconds / len(round_.drafted))
    times = {n: statistics.median(seconds) for n, seconds in verify.items() if n == 0 or len(seconds) >= RARE}
    a_step, a_rest = statistics.median(step) if step else 0.0, statistics.median(rest)
    return [
        min(seconds for width, seconds in times.items() if width >= n) + n * a_step + a_rest
        for n in range(max(times) + 1)
    ]


def shortest(stands: Sequence[bool], seconds: Sequence[float]) -> float:
    """The least sum of rounds; a round of n guesses makes n + 1 tokens, if all n stand."""
    best = [0.0] * (len(stands) + len(seconds))
    for start in range(len(stands) - 1, -1, -1):
        least = float("inf")
        for n, cost in enumerate(seconds):
            least = min(least, cost + best[start + n + 1])
            if start + n < len(stands) and not stands[start + n]:
                break
        best[start] = least
    return best[0]
