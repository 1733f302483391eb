"""Speculative decoding: draft, evaluate the whole draft at once, keep the accepted tokens, repeat.

A coroutine without I/O. It yields requests and is sent the answers; it yields rounds and is sent them back
with their seconds. This is the only loop: for greedy and sampled decoding, any drafter and
none. Rejected tokens need no rollback, because the next request does not contain them. p = target.

References: Algorithm 2 of Chen et al., arXiv 2302.01318; Algorithm 1 of Leviathan et al., arXiv 2211.17192.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from llamaspec.drafters.calling import drafting, reads_rows, report
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.errors import PromptError
from llamaspec.length.fixed import FixedLength, SequenceAtMost
from llamaspec.protocols import (
    Drafter,
    RandomStreams,
    Rule,
    SequenceConstraint,
    SequenceLength,
)
from llamaspec.sampling.acceptance_rules import round_of
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.sampler import LogitsTarget, Sampler, round_logprobs
from llamaspec.values import NO_SCOPE, PICTURE, TARGET, Forward, ForwardRequest, Round, Scope, TokenArray

Speculating: TypeAlias = Generator[ForwardRequest | Round, Any, None]  # sent Forward, or the same Round
NextRound: TypeAlias = Generator[ForwardRequest | Round, Any, Round]


@dataclass(frozen=True, slots=True, eq=False)
class Speculation:
    """A prompt, and everything that the loop needs to continue it; without a drafter, plain decoding.

    The distribution of the completion depends only on target, prompt, `sampling` and `constraint`.
    """

    prompt: TokenArray  # [n] int32
    max_tokens: int
    context_size: int  # of the target, in tokens
    rule: Rule
    sampling: Sampling
    streams: RandomStreams
    constraint: SequenceConstraint | None = None  # restricts the completion
    drafter: Drafter = field(default_factory=NoDrafter)
    length: SequenceLength = field(default_factory=lambda: FixedLength(0))  # how many tokens to draft
    max_scored: int | None = None  # positions that the target can score in one evaluation; None = any number
    n_logprobs: int | None = None  # most probable tokens reported with each token; None = no logprobs
    scope: Scope = NO_SCOPE  # whose sequence it is
    n_cached: Callable[[TokenArray], int] = lambda tokens: 0  # how many of the first the target has cached
    on_end: Callable[[TokenArray, TokenArray], None] | None = None  # receives the prompt and the completion

    def __post_init__(self) -> None:
        n = len(self.prompt)
        if n == 0:
            raise PromptError("the prompt is empty; give some text to continue")
        if n >= self.context_size:
            raise PromptError(
                f"the prompt has {n} tokens, which leaves no room in a context of {self.context_size}; "
                f"shorten it or use a larger context"
            )
        if self.max_tokens < 1:
            raise ValueError(f"max tokens must be >= 1, got {self.max_tokens}")

    @property
    def limit(self) -> int:
        """Maximum length of the sequence, in tokens."""
        return min(len(self.prompt) + self.max_tokens, self.context_size)

    @property
    def sampler(self) -> Sampler:
        """How the tokens of the completion are drawn."""
        return Sampler(self.sampling, len(self.prompt), self.constraint)

    def close(self) -> None:
        """End the sequence. May be called more than once."""
        self.length.close()


def speculate(config: Speculation) -> Speculating:
    """Continue a prompt until the sequence has its maximum length.

    Yields
    ------
    ForwardRequest
        Expects a `Forward` in return.
    Round
        Expects the same round with its seconds in return, once the length policy has observed it. Each round
        adds at least one token.
    """
    tokens, sampler = config.prompt, config.sampler
    while len(tokens) < config.limit:
        round_ = yield from _next_round(tokens, config, sampler)
        tokens = np.concatenate((tokens, round_.tokens))


def _next_round(tokens: TokenArray, config: Speculation, sampler: Sampler) -> NextRound:
    """Continue `tokens` by one round."""
    length, rule, reading = config.length, config.rule, config.length.reading

    # Draft as many tokens as the policy wants, and verify those that are worth their time.
    n_most = config.limit - len(tokens) - 1  # the target adds a token of its own
    if config.max_scored is not None:
        n_most = min(n_most, config.max_scored - 1)
    made = yield from drafting(config.drafter, tokens, SequenceAtMost(n_most, length))
    made = made.first(n_most)  # the drafter may not have asked the policy
    is_picture = made.tokens >= PICTURE  # a copy goes up to the next picture
    if is_picture.any():
        made = made.first(int(is_picture.argmax()))
    draft = made.first(max(length.n_verified(made), 0))

    # Evaluate the draft at once: logits after `tokens` and after each draft token.
    rows_from = len(tokens) - 1 if reads_rows(config.drafter) else None
    forward: Forward = yield ForwardRequest(
        TARGET, tokens, draft=draft.tokens, rows_from=rows_from, scope=config.scope
    )

    # Accept draft tokens, and draw the next token.
    p = LogitsTarget(forward.logits, tokens, draft, sampler)
    verification = rule.verify(draft, p, config.streams, len(tokens))
    n_top = config.n_logprobs
    round_: Round = yield replace(
        round_of(made, draft, forward, verification, rule, p),
        logprobs=() if n_top is None else round_logprobs(forward.logits, draft, verification, n_top),
        plain_seconds=None if reading is None else reading.plain_seconds(forward.evaluation),
    )
    # The target has not evaluated its own token yet.
    report(config.drafter, np.concatenate((tokens, round_.tokens[:-1])), forward.hidden)
    return round_
