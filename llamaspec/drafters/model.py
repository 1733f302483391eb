"""Draft tokens from a small model, one after the other, each from the model's own distribution.

The draft model's KV cache keeps what it has processed, so every token costs one step. A model that fails is
not used again in this sequence; tokens drawn before the failure stay in the draft, or the distribution of the
output would change. tests/drafters/test_model.py counts the evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llamaspec.drafters.common_vocabulary import CommonTokens, SameTokens
from llamaspec.errors import EVALUATION_FAULTS, ContextFullError, EvaluationAbortedError
from llamaspec.length.tree import CONTEXT, CandidateTree, Growth, TreeLength
from llamaspec.protocols import (
    Drafting,
    Preparing,
    PromptReading,
    RandomStreams,
    Rule,
    SequenceConstraint,
    SequenceLength,
)
from llamaspec.sampling.filters import Sampling, confidence
from llamaspec.sampling.sampler import Sampler, candidates
from llamaspec.values import DRAFT, Draft, ForwardRequest, Source, TokenArray

N_CANDIDATES = 4  # for each position of a tree
DEEPEST = 64  # maximum depth of a tree


@dataclass(slots=True)
class ModelDrafter:
    """Draws draft tokens from a model; if a constraint leaves only one token, the model is not evaluated."""

    vocabulary_size: int  # of the draft model
    context_size: int  # of the draft model, in tokens
    sampling: Sampling  # for the draft; usually the target's
    rule: Rule  # draws the tokens
    streams: RandomStreams  # the same as the target's
    n_tokens: int | None = None  # the target's vocabulary size, if the draft's differs
    model: str = DRAFT  # its name in requests
    source: Source = Source.MODEL
    tokens: CommonTokens | None = None  # the shared tokens, if the vocabularies differ
    longest: int | None = None  # maximum number of draft tokens in a round
    n_prompt: int = 0  # tokens before the first that was generated
    constraint: SequenceConstraint | None = None  # restricts the text
    reading: PromptReading | None = None  # decides when the model processes a prompt; None = at once
    n_cached: Callable[[TokenArray], int] | None = None  # tokens that are in the model's KV cache
    fault: str | None = field(default=None, init=False)  # the error after which the model is not used again
    _is_asleep: bool | None = field(default=None, init=False)  # the prompt is unprocessed; None = undecided
    _n_read: int = field(default=0, init=False)  # prompt tokens processed while asleep

    def prepare(self, context: TokenArray) -> Preparing:
        """Process all but the last token, so that the first draft token costs as much as the next."""
        if self.reading is not None and self._is_asleep is None:
            self._n_read = 0 if self.n_cached is None else self.n_cached(self.known(context))
            n_unread = max(self.n_prompt, len(context)) - self._n_read
            self.reading.start_prompt(n_unread)
            self._is_asleep = True
        if not self._is_asleep:
            yield from self._read(self.window(self.known(context))[:-1])

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting:
        """Draft until the policy wants no more, or the draft's KV cache is full."""
        sampler = Sampler(self.sampling, self.n_prompt, self.constraint)
        tokens, draft, known = self._tokens, Draft(source=self.source), self.known(context)
        if self.fault is not None:
            return draft
        if self._is_asleep and self.reading is not None:
            if not length.wants_more(draft):
                return draft
            path, n_to_read = self.window(known)[:-1], self.reading.n_to_read
            n = min(self._n_read + (n_to_read or len(path)), len(path))
            yield from self._read(path[:n])
            self._n_read, self._is_asleep = n, n < len(path)
            if n_to_read:
                return draft
        while len(draft) != self.longest and length.wants_more(draft):
            text = np.concatenate([context, draft.tokens])
            allowed = sampler.allowed(text)
            if allowed is not None:
                if len(allowed) == 1:
                    draft = draft.plus(int(allowed[0]))
                    continue
                allowed = tokens.among(allowed)
                if not len(allowed):
                    break
            path = np.concatenate([known, tokens.spelled(draft.tokens)])
            try:
                forward = yield ForwardRequest(self.model, self.window(path))
            except EVALUATION_FAULTS as error:
                self.note_fault(error)
                break
            logits = tokens.scores(forward.logits[0])
            q = sampler.distribution(logits, text, allowed)
            token = self.rule.draw(q, self.streams, len(context), len(draft))
            draft = draft.plus(token, q, confidence(logits, token, q, allowed))
        return draft

    def _read(self, prefix: TokenArray) -> Preparing:
        if not len(prefix) or self.fault is not None:
            return
        try:
            forward = yield ForwardRequest(self.model, prefix, n_logits=0)
        except EVALUATION_FAULTS as error:
            self.note_fault(error)  # decoding goes on without the draft
            return
        if self.reading is not None:
            self.reading.observe_reading(len(prefix) - forward.n_cached, forward.seconds)

    def note_fault(self, error: Exception) -> None:
        """Stop using the model, unless its context was full: there may be room in the next round."""
        if isinstance(error, EvaluationAbortedError):
            raise error
        if not isinstance(error, ContextFullError):
            self.fault = str(error)

    @property
    def n_drawn(self) -> int:
        """Token ids below this can be drawn."""
        return min(self.n_tokens or self.vocabulary_size, self.vocabulary_size)

    def known(self, context: TokenArray) -> TokenArray:
        """The context in the model's own tokens."""
        return self._tokens.read(context)

    def window(self, path: TokenArray) -> TokenArray:
        """The end of the path that fits the model's context.

        Its start moves by half a context at a time: in between, the KV cache stays useful.
        """
        excess = len(path) - self.context_size
        if excess <= 0:
            return path
        half = max(1, self.context_size // 2)
        return path[-(-excess // half) * half :]

    @property
    def _tokens(self) -> CommonTokens | SameTokens:
        return self.tokens or SameTokens(self.vocabulary_size, self.n_tokens or self.vocabulary_size)


@dataclass(slots=True)
class TreeDrafter(ModelDrafter):
    """Drafts trees if the length policy allows them, else chains. Only the coupled rule verifies trees.

    The model evaluates a whole level in one step. The candidates of a position have the greatest log q + g,
    with the noise g that the target will sample with; the first is the token that a chain would draft.
    """

    trees: TreeLength = field(kw_only=True)

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting:
        """Draft a tree or a chain."""
        has_room = len(context) + DEEPEST <= self.context_size
        can_grow = has_room and self.fault is None and self.tokens is None and self.constraint is None
        growth = self.trees.tree() if can_grow else None
        return ModelDrafter.propose(self, context, length) if growth is None else self._grow(context, growth)

    def _grow(self, context: TokenArray, growth: Growth) -> Drafting:
        known, tree = self.known(context), CandidateTree()
        sampler = Sampler(self.sampling, self.n_prompt)
        while nodes := growth.expand(tree):
            try:
                forward = yield self._level(known, tree, nodes)
            except EVALUATION_FAULTS as error:
                self.note_fault(error)
                break
            for node, logits in zip(nodes, forward.logits[:, : self.n_drawn], strict=True):
                path = np.concatenate([known, tree.path(node)])
                tree.add(node, *candidates(logits, sampler, path, self.streams, N_CANDIDATES))
        return tree.draft(growth.keep(tree), self.source)

    def _level(self, context: TokenArray, tree: CandidateTree, nodes: Sequence[int]) -> ForwardRequest:
        """Request the evaluation of some nodes, each after its ancestors."""
        if nodes[0] == CONTEXT:
            return ForwardRequest(self.model, context)
        n_read = len(tree.read)
        tree.read += nodes
        read = tree.listed(tree.read)
        return ForwardRequest(self.model, context, 0, read.tokens, read.parents, n_read)
