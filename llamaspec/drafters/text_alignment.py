"""Draft tokens from a model that spells text differently: it writes, and its text is tokenized anew.

The draft reads the text in its own tokens and draws its own. What they spell is cut into tokens of the
target, and these are proposed as certain, as n-gram drafts are: so every rule keeps its law, whatever was
drawn. Under the coupled rule a token that the target has too is drawn with the target's noise. Knows nothing
of the target but its vocabulary. tests/engine/test_foreign_law.py, tests/drafters/test_text_alignment.py.

References: universal assisted generation (transformers, 2024); SLEM, Timor et al., arXiv 2502.05202.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod

import numpy as np

from llamaspec.drafters.spelling import Spelling, TextMirror, complete
from llamaspec.drafters.token_map import TokenMap
from llamaspec.drafters.window import window
from llamaspec.errors import ContextFullError, ScoresError
from llamaspec.protocols import Drafting, Preparing, RandomStreams, RowLength, Rule
from llamaspec.sampling.distributions import confidence, distribution
from llamaspec.sampling.parameters import Sampling
from llamaspec.values import DRAFT, NO_DRAFT, Distribution, Draft, ForwardRequest, Logits, TokenArray

WHOLE = 0.7  # of the draft's tokens must end where the target's do; else the end of a word is awaited
WORD_END = re.compile(
    rb"(?<=[A-Za-z\x80-\xff])(?=[^A-Za-z\x80-\xff])|(?<=\d)(?=\D)|(?<=[!-/:-@\[-`{-~])(?=[^!-/:-@\[-`{-~])"
)
MOST_STEPS = 24  # tokens of the draft in a row that make no further token of the target


@dataclass(slots=True)
class AlignedDrafter:
    """Draws text from a model with another vocabulary.

    Parameters
    ----------
    target, draft : Spelling
    tokens : TokenMap
    context_size : int
        Of the draft model, in tokens.
    sampling : Sampling
        The draft's own chain. Under rules other than the coupled one, which accept a token by its probability
        alone, the most probable text is the best draft: temperature 0.
    rule : Rule
        Says with which chance a token is drawn.
    streams : RandomStreams
        The same as the target's.
    whole : float
        How often a draft token ends where a token of the target does. Where that is seldom, tokens are
        proposed once the draft has gone on behind their word.
    """

    target: Spelling
    draft: Spelling
    tokens: TokenMap
    context_size: int
    sampling: Sampling
    rule: Rule
    streams: RandomStreams
    whole: float = 1.0
    model: str = DRAFT
    is_silent: bool = field(default=False, init=False)  # its scores were no numbers: it drafts no more
    _mirror: TextMirror = field(init=False)
    _noise: TokenArray = field(init=False)

    def __post_init__(self) -> None:
        self._mirror = TextMirror(self.target, self.draft, self.tokens.specials(), self.tokens.begin)
        self._noise = self.tokens.noise

    def prepare(self, context: TokenArray) -> Preparing:
        """Read all but the last token, so that the first draft token costs no more than the next."""
        prefix = window(self._mirror.read(context), self.context_size)[:-1]
        if len(prefix):
            with suppress(ContextFullError):  # without the draft it is only slower
                yield ForwardRequest(self.model, prefix, n_logits=0)

    def propose(self, context: TokenArray, length: RowLength) -> Drafting:
        """Draft until the policy has enough, the draft's KV cache has no room, or the text ends."""
        draft, written, known = NO_DRAFT, _Written(self), self._mirror.read(context)
        n_steps = 0
        while not self.is_silent and len(known) and n_steps < MOST_STEPS and length.wants_more(draft):
            path = window(np.concatenate([known, np.array(written.own, np.int32)]), self.context_size)
            try:
                forward = yield ForwardRequest(self.model, path)
            except ContextFullError:
                break
            except ScoresError:
                self.is_silent = True
                break
            logits, n_steps = forward.logits, n_steps + 1
            end = self._draw(logits, written, len(context))
            before = len(draft)
            draft = written.offered(draft, length, has_ended=end is not None)
            if end is not None:
                if end >= 0 and len(draft) == written.n_tokens and length.wants_more(draft):
                    draft = draft.plus(end, Distribution.certain(end), written.confidences[-1])
                break
            if len(draft) < written.n_settled:
                break  # the policy has enough
            if len(draft) != before:
                n_steps = 0
        return draft

    def _draw(self, logits: Logits, written: _Written, start: int) -> int | None:
        """Draw the draft's next token; where it is no text, the token of the target that it means, or -1."""
        q = distribution(logits[0], self.sampling)
        token = int(q.tokens[0])
        if len(q.tokens) > 1:
            ids = self._noise[q.tokens]
            order = ids.argsort()
            drawn = Distribution(ids[order], q.probabilities[order])
            chosen = self.rule.draw(drawn, self.streams, start, written.n_tokens)
            token = int(q.tokens[np.flatnonzero(ids == chosen)[0]])
        written.confidences.append(confidence(logits[0], token, q))
        if token in self.draft.specials or not self.draft.pieces[token]:
            return int(self.tokens.to_target[token])
        written.add(token)
        return None


class _Written:
    """The text that the draft has drawn in one round, in its own tokens and in the target's."""

    def __init__(self, drafter: AlignedDrafter) -> None:
        self._target, self._pieces, self._whole = drafter.target, drafter.draft.pieces, drafter.whole
        self.own: list[int] = []
        self.confidences: list[float] = []  # of each of them, and of what is no text
        self._begins: list[int] = []  # where each begins, in bytes
        self._text = b""
        self._tokens: list[int] = []
        self.n_settled = 0  # tokens that may be proposed

    @property
    def n_tokens(self) -> int:
        """Tokens of the target that spell what is whole of the text."""
        return len(self._tokens)

    def add(self, token: int) -> None:
        """The draft has drawn a token."""
        self._begins.append(len(self._text))
        self.own.append(token)
        self._text += self._pieces[token]
        self._tokens = self._target.tokens(complete(self._text)).tolist()

    def offered(self, draft: Draft, length: RowLength, *, has_ended: bool) -> Draft:
        """The tokens of the text, as far as the policy wants them."""
        is_open = not has_ended and len(self._tokens) > 0
        self.n_settled = len(self._tokens)
        if is_open and self._whole < WHOLE:
            self.n_settled = self._n_before_last_word()
        confidences = self._spread()
        if is_open:
            confidences[-1] *= self._whole
        n = 0
        while n < min(len(draft), self.n_settled) and int(draft.tokens[n]) == self._tokens[n]:
            n += 1
        draft = draft.first(n)
        offered = Draft(draft.tokens, draft.distributions, tuple(confidences[:n]), draft.source)
        for token, chance in zip(self._tokens[n : self.n_settled], confidences[n:], strict=False):
            if not length.wants_more(offered):
                break
            offered = offered.plus(token, Distribution.certain(token), chance)
        return offered

    def _n_before_last_word(self) -> int:
        """Tokens of the target that what follows will not change."""
        end = max((found.start() for found in WORD_END.finditer(self._text)), default=0)
        lengths = [len(self._target.pieces[token]) for token in self._tokens]
        return int(np.searchsorted(np.cumsum(lengths), end, side="right"))

    def _spread(self) -> list[float]:
        """The confidence of each token of the target: of all draft tokens that begin in it."""
        found, end, i = [], 0, 0
        for token in self._tokens:
            begin, end = i, end + len(self._target.pieces[token])
            while i < len(self._begins) and self._begins[i] < end:
                i += 1
            found.append(prod(self.confidences[begin:i]))
        return found
