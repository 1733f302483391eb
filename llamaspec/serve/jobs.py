"""A text that a client asked for, as the decoder takes it: tokens and numbers, nothing of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llamaspec.drafters.no_drafter import NoDrafter
from llamaspec.engine.stream import Progress, TextStream
from llamaspec.pair import Pair
from llamaspec.protocols import Drafter, LengthPolicy, RowLength
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.sampling.parameters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import Draft, Round, TokenArray


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a request wants to be drafted for; None = as the server does."""

    enabled: bool = True
    max_draft: int | None = None  # draft tokens in a round at most
    rule: str = DEFAULT_RULE
    ngram: bool | None = None  # False: do not copy from earlier text


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One text."""

    prompt: TokenArray  # [n] int32
    sampling: Sampling
    seed: int
    max_tokens: int
    stops: tuple[str, ...] = ()
    drafting: Drafting = field(default_factory=Drafting)
    extras: Mapping[str, Any] = field(default_factory=dict)  # more arguments of Pair.stream

    def with_seed(self, seed: int) -> Job:
        """The same with another seed."""
        return replace(self, seed=seed)

    def start(self, pair: Pair, policy: LengthPolicy, on_prefill: Progress) -> TextStream:
        """The stream of this text."""
        limit = self.drafting.max_draft
        return pair.stream(
            self.prompt,
            sampling=self.sampling,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stops=self.stops,
            rule=self.drafting.rule,
            policy=policy if limit is None else AtMost(policy, limit),
            drafter=self._drafter(pair),
            on_prefill=on_prefill,
            **self.extras,
        )

    def _drafter(self, pair: Pair) -> Drafter | None:
        if not self.drafting.enabled or self.drafting.max_draft == 0:
            return NoDrafter()
        if self.drafting.ngram is False and pair.ngram:
            if pair.draft is None:
                return NoDrafter()
            return pair.model_drafter(self.sampling, self.drafting.rule, SeededStreams(self.seed))
        return None


@dataclass(frozen=True, slots=True)
class AtMost:
    """A length policy that never wants more than so many draft tokens."""

    policy: LengthPolicy
    limit: int

    def start_row(self) -> RowAtMost:
        """A text begins."""
        return RowAtMost(self.policy.start_row(), self.limit)


@dataclass(frozen=True, slots=True)
class RowAtMost:
    """One text's share of it."""

    row: RowLength
    limit: int

    def wants_more(self, draft: Draft) -> bool:
        """As the policy decides, below the limit."""
        return len(draft) < self.limit and self.row.wants_more(draft)

    def width(self, n_positions: int) -> int | None:
        """As the policy decides."""
        return self.row.width(n_positions)

    def observe(self, round_: Round) -> None:
        """The policy learns."""
        self.row.observe(round_)

    def close(self) -> None:
        """The text has ended."""
        self.row.close()
