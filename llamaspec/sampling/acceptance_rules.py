"""The three acceptance rules: which draft tokens the target keeps. Each leaves the law of the text as it was.

Letters as in Leviathan et al.: p = target, q = draft, x_i = draft token i, K = number of draft tokens; the
papers count from 1, this code from 0. Knows neither models nor time. tests/engine/test_exact_law.py proves
each rule by walking every branch of chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from llamaspec.protocols import RandomStreams, Rule, Stream, TargetDistributions
from llamaspec.values import Distribution, Draft, Verification

DEFAULT_RULE = "coupled"


class Coupled:
    """The target draws its own token at every position; a draft token is accepted if it equals it.

    Draft and target share the noise of a position, so the text for a seed is the same with any draft and
    with none, and draft tokens may come from anywhere, also as a tree: the branch that holds the target's
    token is followed.

    References
    ----------
    Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding",
    arXiv 2408.07978; for several candidates arXiv 2506.05632.
    """

    name = "coupled"
    drops = True  # the target's tokens do not depend on which draft tokens it sees

    def draw(self, distribution: Distribution, streams: RandomStreams, start: int, i: int) -> int:
        """Draw draft token `i` with the noise that the target will use at its position."""
        return streams.choose(distribution, Stream.TOKEN, start + i)

    def verify(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> Verification:
        """Accept the draft tokens that the target draws itself."""
        path: list[int] = []
        while True:
            node = path[-1] if path else -1
            token = streams.choose(target.after(node), Stream.TOKEN, start + len(path))
            same = [child for child in draft.children(node) if draft.tokens[child] == token]
            if not same:
                return _verification(path, token, target)
            path.append(same[0])

    def acceptance(self, token: int, q: Distribution, p: Distribution, drawn: int) -> float:
        """Known: whether the target drew it."""
        return float(token == drawn)


class _Drawing:
    """What `Rejection` and `Block` have in common: draft tokens with noise of their own."""

    drops = False

    def draw(self, distribution: Distribution, streams: RandomStreams, start: int, i: int) -> int:
        """Draw draft token `i` independently of the target's draws."""
        return streams.choose(distribution, Stream.DRAFT, start + i, attempt=start)

    def acceptance(self, token: int, q: Distribution, p: Distribution, drawn: int) -> float:
        """min(1, p(x) / q(x)); the quotient itself could overflow."""
        p_x, q_x = p.probability(token), q.probability(token)
        return 1.0 if p_x >= q_x else p_x / q_x


class Rejection(_Drawing):
    """Accept x with probability min(1, p(x) / q(x)); in place of the first rejected one draw from p - q.

    References
    ----------
    Algorithm 2 of Chen et al., arXiv 2302.01318 (which swaps the letters); Algorithm 1 of Leviathan et
    al., arXiv 2211.17192.
    """

    name = "rejection"

    def verify(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> Verification:
        """Verify the draft tokens in order until one is rejected."""
        _check_chain(draft, self.name)
        for i, (x, q) in enumerate(zip(draft.tokens.tolist(), draft.distributions, strict=True)):
            p = target.after(i - 1)
            p_x, q_x = p.probability(x), q.probability(x)
            # p(x) >= q(x) first: the quotient could overflow where q(x) is subnormal.
            if p_x >= q_x or streams.chance(p_x / q_x, Stream.ACCEPT, start + i, attempt=start):
                continue
            token = streams.choose(residual(p, q), Stream.RESIDUAL, start + i, attempt=start)
            return _verification(range(i), token, target)
        return _all_accepted(draft, target, streams, start)


class Block(_Drawing):
    """Verify the draft tokens together: never fewer accepted tokens than by rejection one by one.

    References
    ----------
    Algorithm 2 of Sun et al., "Block verification accelerates speculative decoding", arXiv 2403.10444.
    """

    name = "block"

    def verify(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> Verification:
        """Keep the longest run of draft tokens whose joint probability allows it."""
        _check_chain(draft, self.name)
        n_accepted, kept_weight = 0, 1.0
        weight = 1.0  # P_i of the paper
        for i, (x, q) in enumerate(zip(draft.tokens.tolist(), draft.distributions, strict=True)):
            p_x, q_x = target.after(i - 1).probability(x), q.probability(x)
            weight = 1.0 if weight * p_x >= q_x else weight * p_x / q_x
            if weight == 0:
                break
            stop = _stop_probability(draft, target, i + 1, weight)
            if streams.chance(stop, Stream.ACCEPT, start + i, attempt=start):
                n_accepted, kept_weight = i + 1, weight
        if n_accepted == len(draft):
            return _all_accepted(draft, target, streams, start)
        rest = residual(target.after(n_accepted - 1), draft.distributions[n_accepted], kept_weight)
        token = streams.choose(rest, Stream.RESIDUAL, start + n_accepted, attempt=start)
        return _verification(range(n_accepted), token, target)


RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in (Coupled(), Rejection(), Block())})


def counterfactual(
    made: Draft, verified: Draft, verification: Verification, rule: Rule, target: TargetDistributions
) -> tuple[float, float] | None:
    """Of the first draft token that was not verified: its confidence, and how likely it would be accepted.

    None where all of `made` was verified, and where a token of `verified` was rejected: then the target has
    drawn no token at that position.
    """
    n = len(verified)
    if len(made) == n or len(verification.path) < n or not made.is_chain or not made.distributions:
        return None
    token, q = int(made.tokens[n]), made.distributions[n]
    return made.confidences[n], rule.acceptance(token, q, target.after(n - 1), verification.next_token)


def residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    """norm(max(weight · p - q, 0)): what the draft has not covered of the target's law.

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


def _stop_probability(draft: Draft, target: TargetDistributions, i: int, weight: float) -> float:
    """h_i of the paper: the chance to stop after draft token `i`, from 1, if no later stop is drawn."""
    if i == len(draft):
        return weight
    surplus = float(_uncovered(target.after(i - 1), draft.distributions[i], weight).sum())
    open_mass = surplus + 1.0 - weight
    return surplus / open_mass if open_mass > 0 else 1.0


def _all_accepted(
    draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
) -> Verification:
    n = len(draft)
    token = streams.choose(target.after(n - 1), Stream.TOKEN, start + n, attempt=start)
    return _verification(range(n), token, target)


def _verification(path: range | list[int], token: int, target: TargetDistributions) -> Verification:
    return Verification(tuple(path), token, tuple([target.after(node) for node in (-1, *path)]))


def _check_chain(draft: Draft, rule: str) -> None:
    if not draft.is_chain:
        raise ValueError(f"the {rule} rule verifies chains, not trees; use the coupled rule")
