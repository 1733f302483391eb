"""The three rules by which a target judges guesses. Each leaves the law of the text as it was.

Letters as in Leviathan et al.: p = target, q = draft, x_i = guess i, K = number of guesses; the papers
count guesses from 1, this code from 0. Knows neither models nor time. tests/rules/test_exact_law.py
proves each rule by walking every branch of chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from llamaspec.protocols import Dice, Judge, Rule, Use
from llamaspec.values import Distribution, Draft, Verdict


class Coupled:
    """The target draws its own token at every position; a guess stands if it equals it.

    Draft and target share the noise of a position, so the text for a seed is the same with any draft and
    with none, and guesses may come from anywhere.

    References
    ----------
    Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding",
    arXiv 2408.07978.
    """

    name = "coupled"
    may_drop = True  # the target draws the same token, judged or not

    def guess(self, distribution: Distribution, dice: Dice, start: int, i: int) -> int:
        """Draw guess `i` with the noise that the target will use at its position."""
        return dice.choose(distribution, Use.TOKEN, start + i)

    def verify(self, draft: Draft, target: Judge, dice: Dice, start: int) -> Verdict:
        """Accept the guesses that the target draws itself."""
        for i, x in enumerate(draft.tokens.tolist()):
            token = dice.choose(target.distribution(i), Use.TOKEN, start + i)
            if token != x:
                return Verdict(i, token)
        return Verdict(
            len(draft), dice.choose(target.distribution(len(draft)), Use.TOKEN, start + len(draft))
        )


class Rejection:
    """Accept x with probability min(1, p(x) / q(x)); in place of the first rejected one draw from p - q.

    References
    ----------
    Algorithm 2 of Chen et al., arXiv 2302.01318 (which swaps the letters); Algorithm 1 of Leviathan et
    al., arXiv 2211.17192.
    """

    name = "rejection"
    may_drop = False  # what is drawn in place of a dropped guess would have to be drawn from p - q

    def guess(self, distribution: Distribution, dice: Dice, start: int, i: int) -> int:
        """Draw guess `i` independently of the target's draws."""
        return dice.choose(distribution, Use.GUESS, start + i, attempt=start)

    def verify(self, draft: Draft, target: Judge, dice: Dice, start: int) -> Verdict:
        """Judge the guesses in order until one falls."""
        for i, (x, q) in enumerate(zip(draft.tokens.tolist(), draft.distributions, strict=True)):
            p = target.distribution(i)
            p_x, q_x = p.probability(x), q.probability(x)
            # p(x) >= q(x) first: the quotient could overflow where q(x) is subnormal.
            if p_x >= q_x or dice.chance(p_x / q_x, Use.ACCEPT, start + i, attempt=start):
                continue
            return Verdict(i, dice.choose(residual(p, q), Use.RESIDUAL, start + i, attempt=start))
        return _all_accepted(draft, target, dice, start)


class Block:
    """Judge the guesses together: never fewer accepted tokens than by rejection one by one.

    References
    ----------
    Algorithm 2 of Sun et al., "Block verification accelerates speculative decoding", arXiv 2403.10444.
    """

    name = "block"
    may_drop = False

    def guess(self, distribution: Distribution, dice: Dice, start: int, i: int) -> int:
        """Draw guess `i` independently of the target's draws."""
        return dice.choose(distribution, Use.GUESS, start + i, attempt=start)

    def verify(self, draft: Draft, target: Judge, dice: Dice, start: int) -> Verdict:
        """Keep the longest run of guesses whose joint probability allows it."""
        n_accepted, kept_weight = 0, 1.0
        weight = 1.0  # P_i of the paper
        for i, (x, q) in enumerate(zip(draft.tokens.tolist(), draft.distributions, strict=True)):
            p_x, q_x = target.distribution(i).probability(x), q.probability(x)
            weight = 1.0 if weight * p_x >= q_x else weight * p_x / q_x
            if weight == 0:
                break
            if dice.chance(
                _stop_probability(draft, target, i + 1, weight), Use.ACCEPT, start + i, attempt=start
            ):
                n_accepted, kept_weight = i + 1, weight
        if n_accepted == len(draft):
            return _all_accepted(draft, target, dice, start)
        rest = residual(target.distribution(n_accepted), draft.distributions[n_accepted], kept_weight)
        return Verdict(n_accepted, dice.choose(rest, Use.RESIDUAL, start + n_accepted, attempt=start))


RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in (Coupled(), Rejection(), Block())})


def residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    """norm(max(weight · p - q, 0)): what the guesses have not covered of the target's law.

    Where rounding leaves nothing, the two laws are equal, and the answer is p.
    """
    uncovered = _uncovered(p, q, weight)
    total = uncovered.sum()
    if total <= 0:
        return p
    positive = uncovered > 0
    return Distribution(p.tokens[positive], uncovered[positive] / total)


def _uncovered(
    p: Distribution, q: Distribution, weight: float
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """max(weight · p - q, 0) on the tokens of p: float64 [S]."""
    q_on_p = np.zeros(len(p.tokens))
    _, in_p, in_q = np.intersect1d(p.tokens, q.tokens, assume_unique=True, return_indices=True)
    q_on_p[in_p] = q.probabilities[in_q]
    return np.maximum(weight * p.probabilities - q_on_p, 0.0)


def _stop_probability(draft: Draft, target: Judge, i: int, weight: float) -> float:
    """h_i of the paper: the chance to stop after guess `i`, counted from 1, if no later stop is chosen."""
    if i == len(draft):
        return weight
    surplus = float(_uncovered(target.distribution(i), draft.distributions[i], weight).sum())
    open_mass = surplus + 1.0 - weight
    return surplus / open_mass if open_mass > 0 else 1.0


def _all_accepted(draft: Draft, target: Judge, dice: Dice, start: int) -> Verdict:
    position = start + len(draft)
    token = dice.choose(target.distribution(len(draft)), Use.TOKEN, position, attempt=start)
    return Verdict(len(draft), token)
