"""The three acceptance rules: which draft tokens are accepted. Completions keep the target's distribution.

Letters as in Leviathan et al.: p = target, q = draft, x_i = draft token i, counted from 0.
tests/engine/test_exact_law.py proves each rule by enumerating every outcome of every draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from llamaspec.protocols import RandomStreams, Rule, Stream, TargetDistributions
from llamaspec.values import Distribution, Draft, Forward, Round, Verification

DEFAULT_RULE = "coupled"


class Coupled:
    """The target draws its own token at every position; a draft token is accepted if it is the same.

    Draft and target share the noise of a position, so the completion for a seed is the same with any draft
    and with none.

    References
    ----------
    Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding",
    arXiv 2408.07978.
    """

    name = "coupled"
    drops = True  # the target's tokens do not depend on which draft tokens it verifies

    def draw(self, distribution: Distribution, streams: RandomStreams, start: int, i: int) -> int:
        """Draw draft token `i` with the noise that the target will use for the same position."""
        return streams.choose(distribution, Stream.TOKEN, start + i)

    def verify(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> Verification:
        """Accept draft tokens while the target draws the same ones."""
        n, drafted = 0, draft.tokens.tolist()
        while True:
            token = streams.choose(target.after(n - 1), Stream.TOKEN, start + n)
            if n == len(drafted) or drafted[n] != token:
                return Verification(n, token)
            n += 1

    def acceptance(self, token: int, q: Distribution, p: Distribution, drawn: int) -> float:
        """Return 1 if the target drew the token, else 0."""
        return float(token == drawn)


class Rejection:
    """Accept x with probability min(1, p(x) / q(x)); replace the first rejected token by one from p - q.

    References
    ----------
    Algorithm 2 of Chen et al., arXiv 2302.01318 (which swaps the letters); Algorithm 1 of Leviathan et
    al., arXiv 2211.17192.
    """

    name = "rejection"
    drops = False  # a choice that depends on the drawn tokens would change the distribution

    def draw(self, distribution: Distribution, streams: RandomStreams, start: int, i: int) -> int:
        """Draw draft token `i`, independently of the target's draws."""
        return streams.choose(distribution, Stream.DRAFT, start + i, attempt=start)

    def acceptance(self, token: int, q: Distribution, p: Distribution, drawn: int) -> float:
        """Return min(1, p(x) / q(x)), without a quotient that could overflow."""
        p_x, q_x = p.probability(token), q.probability(token)
        return 1.0 if p_x >= q_x else p_x / q_x

    def verify(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> Verification:
        """Accept the first n draft tokens; draw the next from the residual, or from p if all are accepted."""
        n, weight = self._accepted(draft, target, streams, start)
        rest, stream = target.after(n - 1), Stream.TOKEN
        if n < len(draft):
            rest, stream = residual(rest, draft.distributions[n], weight), Stream.RESIDUAL
        return Verification(n, streams.choose(rest, stream, start + n, attempt=start))

    def _accepted(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> tuple[int, float]:
        """Return the number of accepted draft tokens, and the weight of p in the residual."""
        for i, (x, q) in enumerate(zip(draft.tokens.tolist(), draft.distributions, strict=True)):
            chance = self.acceptance(x, q, target.after(i - 1), x)
            if chance < 1.0 and not streams.chance(chance, Stream.ACCEPT, start + i, attempt=start):
                return i, 1.0
        return len(draft), 1.0


class Block(Rejection):
    """Verify the draft tokens together: on average at least as many are accepted as by `Rejection`.

    References
    ----------
    Algorithm 2 of Sun et al., "Block verification accelerates speculative decoding", arXiv 2403.10444.
    """

    name = "block"

    def _accepted(
        self, draft: Draft, target: TargetDistributions, streams: RandomStreams, start: int
    ) -> tuple[int, float]:
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
        return n_accepted, kept_weight


RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in (Coupled(), Rejection(), Block())})


def round_of(
    made: Draft,
    verified: Draft,
    forward: Forward,
    verification: Verification,
    rule: Rule,
    target: TargetDistributions,
) -> Round:
    """Return a round without its seconds, from a draft, its verified part, and the outcome."""
    return Round(
        draft=verified.without_distributions(),
        n_accepted=verification.n_accepted,
        next_token=verification.next_token,
        verified_in=forward.evaluation,
        n_dropped=len(made) - len(verified),
        counterfactual=_counterfactual(made, verified, verification, rule, target),
    )


def _counterfactual(
    made: Draft, verified: Draft, verification: Verification, rule: Rule, target: TargetDistributions
) -> tuple[float, float] | None:
    """Return the confidence of the first unverified draft token, and its chance of acceptance.

    None if all were verified, or a token before it was rejected.
    """
    n = len(verified)
    if len(made) == n or verification.n_accepted < n or not made.distributions:
        return None
    token, q = int(made.tokens[n]), made.distributions[n]
    return made.confidences[n], rule.acceptance(token, q, target.after(n - 1), verification.next_token)


def residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    """Return norm(max(weight · p - q, 0)), or p if rounding leaves nothing."""
    uncovered = _uncovered(p, q, weight)
    total = uncovered.sum()
    if total <= 0:
        return p
    positive = uncovered > 0
    return Distribution(p.tokens[positive], uncovered[positive] / total)


def _uncovered(
    p: Distribution, q: Distribution, weight: float
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return max(weight · p - q, 0) for the tokens of p: float64 [S]."""
    q_on_p = np.zeros(len(p.tokens))
    _, in_p, in_q = np.intersect1d(p.tokens, q.tokens, assume_unique=True, return_indices=True)
    q_on_p[in_p] = q.probabilities[in_q]
    return np.maximum(weight * p.probabilities - q_on_p, 0.0)


def _stop_probability(draft: Draft, target: TargetDistributions, i: int, weight: float) -> float:
    """Return h_i of the paper: the chance to stop after draft token `i`, counted from 1, if not later."""
    if i == len(draft):
        return weight
    surplus = float(_uncovered(target.after(i - 1), draft.distributions[i], weight).sum())
    open_mass = surplus + 1.0 - weight
    return surplus / open_mass if open_mass > 0 else 1.0
