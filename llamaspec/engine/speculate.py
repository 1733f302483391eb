"""Speculative decoding on one screen: draft, evaluate the whole draft at once, keep what is accepted,
repeat.

A coroutine without I/O: it yields requests and is sent the answers; it yields rounds and is sent them back
with their seconds. Greedy or sampled, chain or tree, with a draft model, other drafts or none: this is the
only loop. Rollback of rejected tokens needs no step, because the next request does
not contain them. Letters: p = target, K = number of draft tokens.

References: Algorithm 2 of Chen et al., arXiv 2302.01318; Algorithm 1 of Leviathan et al., arXiv 2211.17192.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from llamaspec.drafters.fallback import drafting
from llamaspec.length.fixed import SequenceAtMost, prompt_reading
from llamaspec.protocols import (
    Closing,
    Drafter,
    PromptReading,
    RandomStreams,
    Rule,
    SequenceConstraint,
    SequenceLength,
)
from llamaspec.sampling.acceptance_rules import round_of
from llamaspec.sampling.filters import LogitsTarget, Sampler, Sampling, round_logprobs
from llamaspec.values import TARGET, Draft, Forward, ForwardRequest, Round, TokenArray

Speculating: TypeAlias = Generator[ForwardRequest | Round, Any, None]  # sent Forward, or the same Round
NextRound: TypeAlias = Generator[ForwardRequest | Round, Any, Round]


@dataclass(frozen=True, slots=True)
class Speculation:
    """The parts of the loop. Only target, `sampling` and `constraint` decide the law of the completion."""

    drafter: Drafter
    length: SequenceLength
    rule: Rule
    sampling: Sampling
    streams: RandomStreams
    context_size: int  # of the target, in tokens
    max_scored: int | None = None  # positions of one evaluation that the target scores; None = any number
    constraint: SequenceConstraint | None = None  # the form that the text must have
    n_logprobs: int | None = None  # report this many of the most probable tokens with each token

    def close(self) -> None:
        """End the sequence. May be called more than once."""
        self.length.close()
        if isinstance(self.drafter, Closing):
            self.drafter.close()


def speculate(tokens: TokenArray, limit: int, config: Speculation) -> Speculating:
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
    ForwardRequest
        To be sent a `Forward`.
    Round
        To be sent the same round with its seconds. Each adds at least one token.
    """
    sampler = Sampler(config.sampling, len(tokens), config.constraint)
    costs = prompt_reading(config.length)
    while len(tokens) < limit:
        round_ = yield from _next_round(tokens, limit - len(tokens) - 1, config, sampler, costs)
        tokens = np.concatenate((tokens, round_.tokens))


def _next_round(
    tokens: TokenArray, n_draft: int, config: Speculation, sampler: Sampler, costs: PromptReading | None
) -> NextRound:
    """One round behind `tokens`, of at most `n_draft` draft tokens."""
    drafter, length = config.drafter, config.length
    at_most = SequenceAtMost(min(n_draft, (config.max_scored or n_draft + 1) - 1), length)
    draft = yield from drafting(drafter, tokens, at_most)
    made = draft.first(at_most.limit)  # a drafter may not have asked
    draft = made.first(max(length.n_verified(made), 0))
    draft = _evaluable(draft, length, config.context_size + 1 - len(tokens))
    forward: Forward = yield ForwardRequest(TARGET, tokens, draft=draft.tokens, parents=draft.parents)

    p = LogitsTarget(forward.logits, tokens, draft, sampler)
    verification = config.rule.verify(draft, p, config.streams, len(tokens))
    n_top = config.n_logprobs
    round_: Round = yield replace(
        round_of(made, draft, forward, verification, config.rule, p),
        logprobs=() if n_top is None else round_logprobs(forward.logits, draft, verification, n_top),
        plain_seconds=None if costs is None else costs.plain_seconds(forward.n_sequences),
    )
    length.observe(round_)
    return round_


def _evaluable(draft: Draft, length: SequenceLength, room: int) -> Draft:
    """The draft, cut until an evaluation of the width that the policy wants (padded, or exact) has room."""
    while len(draft) and (length.width(len(draft) + 1) or room + 1) > room:
        draft = draft.first(len(draft) - 1)
    return draft
