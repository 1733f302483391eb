"""Speculative decoding on one screen: draft, evaluate the whole draft at once, keep what is accepted,
repeat.

A coroutine without I/O: it yields what it wants evaluated and is sent the answer; it yields rounds and is
sent them back with their seconds. Greedy or sampled, chain or tree, with a draft model, with other drafts
or with none: all are this loop. Rollback of rejected tokens needs no step, because the next request does
not contain them. Letters: p = target, K = number of draft tokens.

References: Algorithm 2 of Chen et al., arXiv 2302.01318; Algorithm 1 of Leviathan et al., arXiv 2211.17192.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from llamaspec.drafters.coroutines import drafting
from llamaspec.length.at_most import RowAtMost
from llamaspec.protocols import AheadDrafter, Drafter, RandomStreams, RowConstraint, RowLength, Rule
from llamaspec.sampling.logprobs import round_logprobs
from llamaspec.sampling.parameters import Sampling
from llamaspec.sampling.sampler import LogitsTarget, Sampler
from llamaspec.values import TARGET, Draft, Forward, ForwardRequest, Logits, Round, TokenArray, Verification

Speculating: TypeAlias = Generator[ForwardRequest | Round, Any, None]  # sent Forward, or the same Round
NextRound: TypeAlias = Generator[ForwardRequest | Round, Any, "Verified"]


class Closing(Protocol):
    """Whoever wants to know that a text has ended."""

    def close(self) -> None:
        """The text has ended; more than once is allowed."""


def _all(tokens: TokenArray) -> TokenArray:
    return tokens


@dataclass(frozen=True, slots=True)
class Speculation:
    """What the loop works with; only the target, `sampling` and `constraint` decide the law of the text."""

    drafter: Drafter
    length: RowLength
    rule: Rule
    sampling: Sampling
    streams: RandomStreams
    context_size: int  # of the target, in tokens
    max_scored: int | None = None  # positions of one evaluation that the target scores; None = any number
    constraint: RowConstraint | None = None  # what the text must look like
    n_logprobs: int | None = None  # so many of the most probable tokens are told with each token
    model: str = TARGET  # that verifies; another one writes a draft, see engine/staged.py
    n_tokens: int | None = None  # only token ids below this are written
    shown: Callable[[TokenArray], TokenArray] = _all  # what the model is shown of the text
    others: Sequence[Closing] = ()  # who else is told when the text has ended

    def close(self) -> None:
        """The text has ended; more than once is allowed."""
        for each in (self.length, *self.others):
            each.close()


class Verified(NamedTuple):
    """A round, and what the model that verified it said."""

    round: Round
    verification: Verification
    logits: Logits  # [1 + K, n_tokens] valid until the next request


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
    while len(tokens) < limit:
        verified = yield from next_round(tokens, limit - len(tokens) - 1, config, sampler)
        tokens = np.concatenate((tokens, verified.round.tokens))


def next_round(tokens: TokenArray, n_draft: int, config: Speculation, sampler: Sampler) -> NextRound:
    """One round behind `tokens`, of at most `n_draft` draft tokens."""
    drafter, length, shown = config.drafter, config.length, config.shown(tokens)
    at_most = RowAtMost(min(n_draft, (config.max_scored or n_draft + 1) - 1), length)
    draft = yield from drafting(drafter, tokens, at_most)
    made = draft.first(at_most.limit)  # a drafter may not have asked
    draft = made.first(max(length.n_verified(made), 0))
    draft = _evaluable(draft, length, config.context_size + 1 - len(shown))
    forward: Forward = yield ForwardRequest(
        config.model,
        shown,
        draft=draft.tokens,
        parents=draft.parents,
        meanwhile=drafter.ahead(tokens, draft) if len(draft) and isinstance(drafter, AheadDrafter) else None,
    )

    logits = forward.logits[:, : config.n_tokens]
    p = LogitsTarget(logits, tokens, draft, sampler)
    verification = config.rule.verify(draft, p, config.streams, len(tokens))
    round_: Round = yield Round(
        draft=draft.without_distributions(),
        path=verification.path,
        next_token=verification.next_token,
        width=forward.n_positions,
        n_rows=forward.n_rows,
        evaluation=forward.evaluation,
        logprobs=()
        if config.n_logprobs is None
        else round_logprobs(logits, draft, verification, config.n_logprobs),
        n_beside=forward.n_beside,
        n_dropped=len(made) - len(draft),
        shadow=_shadow(made, draft, verification, config.rule, p),
    )
    length.observe(round_)
    return Verified(round_, verification, logits)


def _shadow(
    made: Draft, draft: Draft, verification: Verification, rule: Rule, p: LogitsTarget
) -> tuple[float, float] | None:
    """Confidence and acceptance of the draft token behind those that were verified, if all of these stand."""
    n = len(draft)
    if len(made) == n or len(verification.path) < n or not made.is_chain or not made.distributions:
        return None
    token, q = int(made.tokens[n]), made.distributions[n]
    return made.confidences[n], rule.acceptance(token, q, p.after(n - 1), verification.next_token)


def _evaluable(draft: Draft, length: RowLength, room: int) -> Draft:
    """The draft, cut until an evaluation as wide as the policy wants it (padded, or exact) has room."""
    while len(draft) and (length.width(len(draft) + 1) or room + 1) > room:
        draft = draft.first(len(draft) - 1)
    return draft
