"""Draft tokens from a small model, one after the other, each drawn from the model's own distribution.

The draft model's KV cache keeps the tokens that it has processed, so every draft token costs one step. After
a failure a sequence does not use the model again, but the tokens that are already drawn stay in the draft:
without them the completion would have another distribution. tests/drafters/test_model.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from llamaspec.errors import (
    EVALUATION_FAULTS,
    ContextFullError,
    EvaluationAbortedError,
    RowsMissingError,
    ScoresError,
)
from llamaspec.protocols import (
    Asking,
    Drafting,
    Preparing,
    PromptReading,
    RandomStreams,
    Rule,
    SequenceLength,
)
from llamaspec.sampling.filters import Scores, confidence
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import (
    DRAFT,
    Distribution,
    Draft,
    Forward,
    ForwardRequest,
    Source,
    TokenArray,
    without_pictures,
)

if TYPE_CHECKING:
    from llamaspec.drafters.common_vocabulary import CommonTokens


class SameTokens:
    """Vocabularies of `n_draft` and `n_target` tokens with the same ids; one may have more at its end."""

    def __init__(self, n_draft: int, n_target: int) -> None:
        self._n_draft, self._n_target = n_draft, n_target

    def translate(self, context: TokenArray) -> TokenArray:
        """Return the context with token 0 in place of tokens that the draft lacks."""
        if self._n_target <= self._n_draft:
            return context
        return np.where(context < self._n_draft, context, np.int32(0))

    translate_each = translate

    def scores(self, logits: Scores) -> Scores:
        """Return the scores of the target's tokens, -inf if the draft lacks one: float32 [V of target]."""
        if self._n_target <= self._n_draft:
            return logits[: self._n_target]
        scores = np.full(self._n_target, -np.inf, dtype=np.float32)
        scores[: self._n_draft] = logits
        return scores

    def drawable(self, tokens: TokenArray) -> TokenArray:
        """Return those of some ascending tokens of the target that the draft can draw."""
        return tokens[: np.searchsorted(tokens, self._n_draft)]


@dataclass(slots=True)
class DeferredPrompt:
    """A prompt that the draft model processes only when the length policy expects that to save time."""

    reading: PromptReading
    n_cached: Callable[[TokenArray], int]  # tokens of a sequence that the draft model's KV cache holds
    _n_processed: int | None = field(default=None, init=False)  # None = nothing left to process

    @classmethod
    def of(
        cls, reading: PromptReading | None, n_cached: Callable[[TokenArray], int], *, reads_rows: bool = False
    ) -> DeferredPrompt | None:
        """Return the deferred prompt of a sequence; None if its draft processes the prompt at once.

        A policy without costs cannot tell when to wait. A draft that `reads_rows` gets those of the prompt
        only once, so it waits only if drafts were slower lately: it then sees no more than the last rows.
        """
        if reading is None or (reads_rows and reading.is_winning):
            return None
        return cls(reading, n_cached)

    @property
    def is_pending(self) -> bool:
        """Whether the draft model has not processed all of the prompt."""
        return self._n_processed is not None

    def start(self, prompt: TokenArray, n_prompt: int) -> None:
        """Report a prompt of `n_prompt` tokens to the length policy, given all of it or its beginning."""
        if self._n_processed is None:
            self._n_processed = self.n_cached(prompt)
            self.reading.start_prompt(max(n_prompt, len(prompt)) - self._n_processed)

    def next_part(self, path: TokenArray) -> tuple[TokenArray, bool]:
        """Return the beginning of the path to process now, and whether that takes the place of a draft."""
        n = self.reading.n_to_read
        end = (self._n_processed or 0) + n if n else len(path)
        self._n_processed = end if end < len(path) else None
        return path[:end], n > 0

    def observe(self, n_tokens: int, forward: Forward) -> None:
        """Report the time of an evaluation of `n_tokens` tokens to the length policy."""
        self.reading.observe_reading(n_tokens - forward.n_cached, forward.seconds)


def lasting_fault(error: Exception) -> str | None:
    """Return why a model is not used again after an error; raise the error if an evaluation was aborted.

    None if the next round may have room in the model's context, or more hidden rows.
    """
    if isinstance(error, EvaluationAbortedError):
        raise error
    return None if isinstance(error, ContextFullError | RowsMissingError) else str(error)


def draft_distribution(
    sampler: Sampler, scores: Scores, sequence: TokenArray, allowed: TokenArray | None
) -> Distribution | None:
    """Return the distribution of a draft token; None if no token that is allowed has a score.

    The model's numbers have been checked: a token without a score is one that its vocabulary lacks.
    """
    if allowed is not None and not len(allowed):
        return None
    try:
        return sampler.distribution(scores, sequence, allowed)
    except ScoresError:
        return None


@dataclass(slots=True)
class ModelDrafter:
    """Draws draft tokens from a model; if a constraint leaves only one token, the model is not evaluated."""

    tokens: SameTokens | CommonTokens  # of the target and the draft model
    context_size: int  # of the draft model, in tokens
    sampler: Sampler  # for the draft; usually the target's
    rule: Rule  # draws the tokens
    streams: RandomStreams  # the same as the target's
    model: str = DRAFT  # its name in requests
    source: Source = Source.MODEL
    longest: int | None = None  # maximum number of draft tokens in a round
    deferred: DeferredPrompt | None = None  # None: the model processes the prompt at once
    fault: str | None = field(default=None, init=False)  # the error after which the model is not used again

    def prepare(self, context: TokenArray) -> Preparing:
        """Process all but the last token, so that the first draft token costs as much as the next."""
        known = self.tokens.translate(without_pictures(context))
        if self.deferred is None:
            yield from self._process(self.window(known)[:-1])
        else:
            self.deferred.start(known, self.sampler.n_prompt)

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting:
        """Draft until the policy wants no more, or the draft model's context is full."""
        tokens, sampler, deferred = self.tokens, self.sampler, self.deferred
        draft, known = Draft(source=self.source), tokens.translate(without_pictures(context))
        if self.fault is not None:
            return draft
        if deferred is not None and deferred.is_pending:
            if not length.wants_more(draft):
                return draft
            prefix, is_instead = deferred.next_part(self.window(known)[:-1])
            yield from self._process(prefix)
            if is_instead:
                return draft
        while len(draft) != self.longest and length.wants_more(draft):
            sequence = np.concatenate([context, draft.tokens])
            allowed = sampler.allowed(sequence)
            if allowed is not None:
                if len(allowed) == 1:
                    draft = draft.plus(int(allowed[0]))
                    continue
                allowed = tokens.drawable(allowed)
                if not len(allowed):
                    break
            path = np.concatenate([known, tokens.translate_each(draft.tokens)])
            try:
                forward = yield from self._ask(path, len(draft))
            except EVALUATION_FAULTS as error:
                self.fault = lasting_fault(error)
                break
            logits = tokens.scores(forward.logits[0])
            q = draft_distribution(sampler, logits, sequence, allowed)
            if q is None:
                break
            token = self.rule.draw(q, self.streams, len(context), len(draft))
            draft = draft.plus(token, q, confidence(logits, token, q, allowed))
        return draft

    def _ask(self, path: TokenArray, n_drafted: int) -> Asking:
        """Return the logits after a path that ends with drafted tokens."""
        return (yield from self._evaluated(self.window(path), 1))

    def _evaluated(self, tokens: TokenArray, n_logits: int) -> Asking:
        return (yield ForwardRequest(self.model, tokens, n_logits, likely_only=True))

    def _process(self, prefix: TokenArray) -> Preparing:
        """Have the model process some tokens without logits; a failure only ends the use of the model."""
        if not len(prefix) or self.fault is not None:
            return
        try:
            forward = yield from self._evaluated(prefix, 0)
        except EVALUATION_FAULTS as error:
            self.fault = lasting_fault(error)
            return
        if self.deferred is not None:
            self.deferred.observe(len(prefix), forward)

    def window(self, path: TokenArray) -> TokenArray:
        """Return the end of the path that fits the model's context.

        Its start moves by half a context at a time, so that the KV cache stays useful in between.
        """
        excess = len(path) - self.context_size
        if excess <= 0:
            return path
        half = max(1, self.context_size // 2)
        return path[-(-excess // half) * half :]
