"""Speculative decoding on one screen: guess, evaluate all guesses at once, keep what stands, repeat.

Greedy or sampled, with a draft model, with other guesses or with none: all are this loop. Taking back
rejected guesses needs no step of its own, because the next question simply does not contain them.
Letters: p = target, x_i = guess i, K = number of guesses.

References: Algorithm 2 of Chen et al., arXiv 2302.01318; Algorithm 1 of Leviathan et al., arXiv 2211.17192.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from llamaspec.protocols import Dice, Drafter, LengthPolicy, Model, Rule
from llamaspec.rules.lengths import AtMost
from llamaspec.rules.sampling import ScoredPath
from llamaspec.values import Ask, Round, Sampling, TokenArray

LANE = 0  # the row of the target's memory that holds the text


@dataclass(frozen=True, slots=True)
class Speculation:
    """Everything that the loop works with; only `target` and `sampling` decide the law of the text."""

    target: Model
    drafter: Drafter
    policy: LengthPolicy
    rule: Rule
    sampling: Sampling
    dice: Dice
    clock: Callable[[], float]  # seconds


def decode(tokens: TokenArray, limit: int, speculation: Speculation) -> Iterator[Round]:
    """Continue a sequence.

    Parameters
    ----------
    tokens : [n] int32, n >= 1
        The prompt.
    limit : int
        Stop when the sequence has this many tokens, at most the target's context size. The last round
        does not exceed it.

    Yields
    ------
    Round
        Each adds at least one token. To stop earlier, stop iterating.
    """
    target, drafter, policy, rule = (
        speculation.target,
        speculation.drafter,
        speculation.policy,
        speculation.rule,
    )
    while len(tokens) < limit:
        start = speculation.clock()
        draft = drafter.propose(tokens, AtMost(policy, limit - len(tokens) - 1))
        drafted = speculation.clock()

        judged = draft.first(policy.n_to_verify(draft)) if rule.may_drop else draft
        path = np.concatenate([tokens, judged.tokens])
        width = min(policy.width(len(judged)), target.context_size + 1 - len(tokens))
        padding = np.full(width - 1 - len(judged), tokens[-1], dtype=np.int32)
        scores = target.logits([Ask(LANE, np.concatenate([path, padding]), width)])[0]  # [width, V]
        verified = speculation.clock()

        p = ScoredPath(scores, path, len(tokens), speculation.sampling)
        verdict = rule.verify(judged, p, speculation.dice, len(tokens))
        round_ = Round(
            drafted=draft.tokens,
            confidences=draft.confidences,
            n_verified=len(judged),
            n_accepted=verdict.n_accepted,
            next_token=verdict.next_token,
            draft_seconds=drafted - start,
            verify_seconds=verified - drafted,
            rest_seconds=speculation.clock() - verified,
            is_copy=draft.is_copy,
        )
        tokens = np.concatenate([tokens, round_.tokens])
        policy.observe(round_)
        yield round_
