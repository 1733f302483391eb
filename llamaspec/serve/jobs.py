"""A text that a client asked for, as the decoder takes it: tokens and numbers, nothing of HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamaspec.chat.answer_stream import AnswerStream, ReasoningLimit
from llamaspec.chat.answers import AnswerParser
from llamaspec.chat.formats import AnswerFormat
from llamaspec.drafters.no_drafter import NoDrafter
from llamaspec.engine.stream import Progress, TextStream
from llamaspec.length.at_most import AtMost
from llamaspec.pair import Pair
from llamaspec.protocols import Constraint, Drafter, LengthPolicy
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.sampling.parameters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import TokenArray


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a request wants to be drafted for; None = as the server does."""

    enabled: bool = True
    max_draft: int | None = None  # draft tokens in a round at most
    rule: str = DEFAULT_RULE
    ngram: bool | None = None  # False: do not copy from earlier text


@dataclass(frozen=True, slots=True, eq=False)
class Manner:
    """What an answer consists of, and what it must look like. The default: text, of any kind."""

    answer_format: AnswerFormat = field(default_factory=AnswerFormat)
    tools: Sequence[Mapping[str, Any]] = ()  # that may be called, in OpenAI's form
    is_thinking: bool = False  # from the first token on
    budget: int | None = None  # tokens of reasoning
    constraint: Constraint | None = None
    constraint_after_cut: Constraint | None = None  # the same, once reasoning was ended by the budget


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One text."""

    prompt: TokenArray  # [n] int32
    sampling: Sampling
    seed: int
    max_tokens: int
    stops: tuple[str, ...] = ()
    drafting: Drafting = field(default_factory=Drafting)
    manner: Manner = field(default_factory=Manner)
    n_logprobs: int | None = None  # so many of the most probable tokens are told with each token

    def start(self, pair: Pair, policy: LengthPolicy, on_prefill: Progress) -> AnswerStream:
        """The stream of this text."""
        limit, manner, vocabulary = self.drafting.max_draft, self.manner, pair.target.vocabulary
        constraints = iter((manner.constraint, manner.constraint_after_cut))

        def open_stream(prompt: TokenArray, max_tokens: int) -> TextStream:
            constraint = next(constraints)
            return pair.stream(
                prompt,
                sampling=self.sampling,
                seed=self.seed,
                max_tokens=max_tokens,
                stops=self.stops,
                spelled=manner.answer_format.spelled(vocabulary.controls),
                rule=self.drafting.rule,
                policy=policy if limit is None else AtMost(limit, policy),
                drafter=self._drafter(pair, len(prompt), constraint),
                on_prefill=on_prefill,
                constraint=constraint,
                logprobs=self.n_logprobs,
            )

        reasoning = manner.answer_format.reasoning
        cut = None if reasoning is None or manner.budget is None else ReasoningLimit(reasoning, manner.budget)
        parser = AnswerParser(manner.answer_format, manner.tools, thinking=manner.is_thinking)
        return AnswerStream(self.prompt, self.max_tokens, open_stream, parser, vocabulary, cut)

    def _drafter(self, pair: Pair, n_prompt: int, constraint: Constraint | None) -> Drafter | None:
        if not self.drafting.enabled or self.drafting.max_draft == 0:
            return NoDrafter()
        if self.drafting.ngram is False and pair.ngram:
            if pair.draft is None:
                return NoDrafter()
            row = None if constraint is None else constraint.start_row()
            return pair.model_drafter(
                self.sampling, self.drafting.rule, SeededStreams(self.seed), n_prompt, row
            )
        return None
