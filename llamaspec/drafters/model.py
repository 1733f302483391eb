"""Draft tokens from a small model, one after the other, each from the model's own distribution.

What the draft model has read stays in its KV cache, so every token costs one step, and tokens that the target
kept are not read twice. Knows nothing of the target. tests/drafters/test_model.py counts the evaluations.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from llamaspec.drafters.token_map import SameTokens, TokenMap
from llamaspec.drafters.window import window
from llamaspec.errors import ContextFullError, ScoresError
from llamaspec.protocols import Drafting, Preparing, RandomStreams, RowConstraint, RowLength, Rule
from llamaspec.sampling.acceptance_rules import Coupled
from llamaspec.sampling.distributions import confidence
from llamaspec.sampling.parameters import Sampling
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import (
    DRAFT,
    NO_TOKENS,
    Distribution,
    Draft,
    ForwardRequest,
    Meanwhile,
    Source,
    TokenArray,
)


@dataclass(slots=True)
class ModelDrafter:
    """Draws draft tokens from a model.

    Parameters
    ----------
    vocabulary_size : int
        Of the draft model; unless there are `tokens`, it must number the same tokens as the target.
    context_size : int
        Of the draft model, in tokens.
    sampling : Sampling
        The draft's own chain; the target's is the natural choice.
    rule : Rule
        Says with which chance a token is drawn.
    streams : RandomStreams
        The same as the target's.
    n_tokens : int, optional
        The target's vocabulary size, where the draft's is another.
    model : str
        The name of the model in requests.
    source : Source
        What it is.
    tokens : TokenMap, optional
        Of a draft that numbers tokens differently: it draws those that both have.
    longest : int, optional
        The most draft tokens of a round that it can make.
    n_prompt : int
        Tokens before the first that was generated.
    constraint : RowConstraint, optional
        What the text must look like. Where it leaves no choice, the model is not asked.
    """

    vocabulary_size: int
    context_size: int
    sampling: Sampling
    rule: Rule
    streams: RandomStreams
    n_tokens: int | None = None
    model: str = DRAFT
    source: Source = Source.MODEL
    tokens: TokenMap | None = None
    longest: int | None = None
    n_prompt: int = 0
    constraint: RowConstraint | None = None
    is_silent: bool = field(default=False, init=False)  # its scores were no numbers: it drafts no more
    _foreseen: TokenArray = field(default_factory=lambda: NO_TOKENS, init=False)  # a text drafted ahead
    _drawn: list[tuple[Distribution, float]] = field(default_factory=list, init=False)  # of its last tokens

    def prepare(self, context: TokenArray) -> Preparing:
        """Read all but the last token, so that the first draft token costs no more than the next."""
        prefix = self.window(self.known(context))[:-1]
        if len(prefix):
            with suppress(ContextFullError):  # without the draft it is only slower
                yield ForwardRequest(self.model, prefix, n_logits=0)

    def propose(self, context: TokenArray, length: RowLength) -> Drafting:
        """Draft until the policy has enough, or the draft's KV cache has no room."""
        sampler = Sampler(self.sampling, self.n_prompt, self.constraint)
        tokens, draft, known = self._tokens, Draft(source=self.source), self.known(context)
        while not self.is_silent and len(draft) != self.longest and length.wants_more(draft):
            text = np.concatenate([context, draft.tokens])
            allowed = sampler.allowed(text)
            if allowed is not None:
                if len(allowed) == 1:
                    draft = draft.plus(int(allowed[0]), Distribution.certain(int(allowed[0])), 1.0)
                    continue
                allowed = tokens.among(allowed)
                if not len(allowed):
                    break
            n_before = self._n_foreseen(text)
            if n_before is not None:
                draft = draft.plus(int(self._foreseen[len(text)]), *self._drawn[n_before])
                continue
            path = np.concatenate([known, tokens.spelled(draft.tokens)])
            try:
                forward = yield ForwardRequest(self.model, self.window(path))
            except ContextFullError:
                break
            except ScoresError:
                self.is_silent = True
                break
            logits = tokens.scores(forward.logits[0])
            q = sampler.distribution(logits, text, allowed)
            token = self.rule.draw(q, self.streams, len(context), len(draft))
            draft = draft.plus(token, q, confidence(logits, token, q, allowed))
        return draft

    def ahead(self, context: TokenArray, draft: Draft) -> Meanwhile | None:
        """Go on behind a draft that is being verified, for the case that all of it is accepted.

        The first token is a guess of the target's own. Where that is right, too, `propose` finds the others
        drawn: they are what it would draw, because under the coupled rule text and position alone decide.
        None where there is nothing to go on from.
        """
        can_foresee = isinstance(self.rule, Coupled) and self.constraint is None and self.longest is None
        if not can_foresee or self.is_silent or not draft.is_chain:
            return None
        return self._draw_ahead(context, draft.tokens)

    def _draw_ahead(self, context: TokenArray, drafted: TokenArray) -> Meanwhile:
        """Draw a guess and twice the draft behind both; what was drawn already is not drawn again."""
        text, n_longest = np.concatenate([context, drafted]), 2 * len(drafted) + 1
        n_before = self._n_foreseen(text)
        if n_before is None:
            self._foreseen, self._drawn = text, []
        else:
            self._drawn = self._drawn[n_before:]
        sampler, tokens = Sampler(self.sampling, self.n_prompt), self._tokens
        while len(self._drawn) < n_longest:
            text = self._foreseen
            forward = yield ForwardRequest(self.model, self.window(self.known(text)))
            logits = tokens.scores(forward.logits[0])
            q = sampler.distribution(logits, text)
            token = self.rule.draw(q, self.streams, len(text), 0)
            self._drawn.append((q, confidence(logits, token, q, None)))
            self._foreseen = np.append(text, np.int32(token))

    def _n_foreseen(self, text: TokenArray) -> int | None:
        """How many of the tokens drawn ahead a text ends with; None where it is another text, or all."""
        n_left = len(self._foreseen) - len(text)
        if not 0 < n_left <= len(self._drawn) or not np.array_equal(text, self._foreseen[: len(text)]):
            return None
        return len(self._drawn) - n_left

    @property
    def n_drawn(self) -> int:
        """Only token ids below this are drawn."""
        return min(self.n_tokens or self.vocabulary_size, self.vocabulary_size)

    def known(self, context: TokenArray) -> TokenArray:
        """The context in the model's own tokens."""
        return self._tokens.read(context)

    def window(self, path: TokenArray) -> TokenArray:
        """The end of the path that fits the model's context."""
        return window(path, self.context_size)

    @property
    def _tokens(self) -> TokenMap | SameTokens:
        return self.tokens or SameTokens(self.vocabulary_size, self.n_tokens or self.vocabulary_size)
