"""Prompt lookup: draft tokens copied from earlier text, without a model.

A copy begins after an earlier occurrence of the longest suffix of the sequence, with the first token of the
caller's prediction, or with the answer to a similar prompt. From then on the sequence is aligned with this
source (`alignment.py`). Of the sequence itself and earlier answers, the one with the stronger agreement is
copied. Copies cost nothing to make; the confidence of each token decides whether the target verifies it.
`llamaspec bench --task edits --task again` measures copies.

Reference: prompt lookup decoding (Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llamaspec.drafters.alignment import FAR, LONGEST_MATCH, MUCH, Alignment, Array
from llamaspec.protocols import SequenceLength
from llamaspec.values import LONGEST_COPY, NO_TOKENS, Distribution, Draft, Source, TokenArray

if TYPE_CHECKING:
    from llamaspec.drafters.earlier import EarlierText, ScopedAnswers

MIN_MATCH = 2  # tokens; a single token says little about the next
MIN_MATCH_BESIDE_MODEL = 4  # tokens; after a shorter match a draft model guesses better
SURE = 8  # strength from which an alignment is not compared with other matches
SWITCH = 12  # tokens of a match elsewhere for which the alignment moves there
TRUST = 0.5  # a match in an earlier answer counts as one of half its length in the sequence itself


def longest_match(tokens: TokenArray, at_least: int) -> tuple[int, int]:
    """Find the longest suffix of `tokens` that also occurs earlier; the latest occurrence of several.

    Returns its length, at most LONGEST_MATCH, and the index of the token after the occurrence; (0, 0) if
    there is none.
    """
    if len(tokens) <= at_least:
        return 0, 0
    alike = tokens[at_least - 1 : -1] == tokens[-1]
    for i in range(1, at_least):
        alike &= tokens[at_least - 1 - i : -1 - i] == tokens[-1 - i]
    ends = np.flatnonzero(alike) + at_least  # [n] index after each occurrence
    if not len(ends):
        return 0, 0
    length = at_least
    while length < min(LONGEST_MATCH, len(tokens)):
        longer = ends[np.searchsorted(ends, length, side="right") :]
        longer = longer[tokens[longer - 1 - length] == tokens[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return length, int(ends[-1])


@dataclass(slots=True)
class Followed:
    """A source and the place in it that the sequence follows."""

    source: Source
    alignment: Alignment
    text: TokenArray | None  # [n]; None = the sequence itself

    @property
    def strength(self) -> float:
        """How well sequence and source agree, as the length of a match in the sequence itself."""
        return self.alignment.strength * (TRUST if self.source is Source.EARLIER else 1.0)


class NgramDrafter:
    """Copies the tokens after the latest occurrence of the longest suffix, and follows that passage.

    A suffix has at least `min_match` tokens. A copy stops after the first token for which `is_end` holds.
    `earlier` are answers that may be copied, too.
    """

    def __init__(
        self,
        min_match: int = MIN_MATCH,
        *,
        prediction: TokenArray = NO_TOKENS,
        earlier: ScopedAnswers | None = None,
        is_end: Callable[[int], bool] = lambda token: False,
    ) -> None:
        self._min_match, self._prediction, self._is_end = min_match, prediction, is_end
        self._answers = earlier
        self._context = NO_TOKENS  # of the last call
        self._n_prompt: int | None = None  # tokens; None before the first draft
        self._own: Followed | None = None  # in the sequence itself, or in the prediction
        self._earlier: Followed | None = None  # in an earlier answer

    def prepare(self, context: TokenArray) -> None:
        """Start with a prompt, or with more of it."""
        self._context = context

    def propose(self, context: TokenArray, length: SequenceLength) -> Draft:
        """Copy while the policy wants more; the confidence of a token depends on the match before it."""
        self._follow(context)
        followed = self._stronger()
        strength = 0.0 if followed is None else followed.strength
        n, begin = (0, 0) if strength >= SURE else longest_match(context, self._min_match)
        if strength < SURE and self._answers is not None:
            # All prompts of a chat template end alike, so only the answer itself is compared.
            answer = context[self._n_prompt :]
            found = self._answers.longest_match(answer, int(max(n, strength) / TRUST))
            if found is not None:
                return self._match_in_answer(found, length)
        if followed is not None and strength >= n:
            return self._aligned(followed, context, length)
        return self._match_in_context(n, begin, context, length) if n else Draft(source=Source.NGRAM)

    def _stronger(self) -> Followed | None:
        """Return the source that agrees better with the sequence; of two alike, the sequence itself."""
        own, earlier = self._own, self._earlier
        if own is None or earlier is None:
            return own or earlier
        return own if own.strength >= earlier.strength else earlier

    def _match_in_answer(self, found: EarlierText, length: SequenceLength) -> Draft:
        """Copy what followed a match in an earlier answer."""
        if self._earlier is None or _moves(self._earlier.alignment, found.n_matched):
            alignment = Alignment(found.at, found.n_matched)
            self._earlier = Followed(Source.EARLIER, alignment, found.text)
        following = found.text[found.at : found.at + _reach(length)]
        return self._copied(Source.EARLIER, following, _growing(found.n_matched, len(following)), length)

    def _match_in_context(self, n: int, begin: int, context: TokenArray, length: SequenceLength) -> Draft:
        """Copy what followed a match of `n` tokens in the sequence itself."""
        own = self._own
        if own is None or (own.source is Source.PREDICTION and n >= SWITCH):
            self._own = Followed(Source.NGRAM, Alignment(begin, n), None)
        elif own.source is Source.NGRAM and _moves(own.alignment, n):
            own.alignment.jump(begin, n)
        # At the end of the context the copy continues with itself: the sequence repeats.
        n_ahead = _reach(length)
        following = np.resize(context[begin : begin + n_ahead], n_ahead)
        return self._copied(Source.NGRAM, following, _growing(n, n_ahead), length)

    def _follow(self, context: TokenArray) -> None:
        """Align the tokens that were added since the last call; begin if this is the first one."""
        before, self._context = self._context, context
        if self._n_prompt is None:
            prompt = before if len(before) else context
            self._n_prompt = len(prompt)
            self._begin(prompt)
        if not np.array_equal(context[: len(before)], before):
            self._own = self._earlier = None  # another sequence
            return
        for followed in (self._own, self._earlier):
            if followed is None:
                continue
            alignment, text = followed.alignment, followed.text
            for i in range(len(before), len(context)):
                n = i - len(
                    alignment.lost
                )  # in the sequence itself, only tokens before this can be the source
                alignment.follow(context[:n] if text is None else text, int(context[i]))
        own = self._own
        if own is not None and own.source is Source.PREDICTION and len(own.alignment.lost) > FAR:
            self._own = None

    def _begin(self, prompt: TokenArray) -> None:
        """Follow the prediction, and the answer to the most similar prompt."""
        if len(self._prediction):
            alignment = Alignment(0, 0)
            alignment.n_before = MUCH
            self._own = Followed(Source.PREDICTION, alignment, self._prediction)
        if self._answers is not None and (found := self._answers.beginning(prompt)) is not None:
            text, alignment = found
            self._earlier = Followed(Source.EARLIER, alignment, text)

    def _aligned(self, followed: Followed, context: TokenArray, length: SequenceLength) -> Draft:
        """Copy the continuation of an alignment."""
        alignment, text = followed.alignment, context if followed.text is None else followed.text
        n_ahead = _reach(length)
        following, strengths = alignment.continuation(text, n_ahead)
        n_left = len(text) - alignment.at
        if followed.text is None and 0 < n_left <= len(following) < n_ahead:  # it repeats itself
            more = _growing(strengths[-1] + 1, n_ahead - len(following))
            following, strengths = np.resize(following, n_ahead), np.concatenate((strengths, more))
        return self._copied(followed.source, following, strengths, length)

    def _copied(
        self, source: Source, following: TokenArray, strengths: Array, length: SequenceLength
    ) -> Draft:
        """Draft the tokens that are expected next while the policy wants more."""
        end = next((i for i, token in enumerate(following.tolist()) if self._is_end(token)), len(following))
        following, strengths = following[: end + 1], strengths[: end + 1]
        ahead = tuple((strengths / (strengths + 1.0)).tolist())
        n = 0
        while n < len(following) and length.wants_more(
            Draft(following[:n], (), ahead[:n], source, ahead[n:])
        ):
            n += 1
        certain = tuple([Distribution.certain(token) for token in following[:n].tolist()])
        return Draft(following[:n], certain, ahead[:n], source)


def _reach(length: SequenceLength) -> int:
    """Return how many tokens to look ahead."""
    return min(length.longest_copy(), LONGEST_COPY)


def _moves(alignment: Alignment, n: int) -> bool:
    """Whether an alignment moves to a match of `n` tokens elsewhere."""
    return n >= SWITCH or len(alignment.lost) > FAR


def _growing(strength: float, n: int) -> Array:
    """Return the strengths of `n` tokens after a match of this length: [n]."""
    return strength + np.arange(float(n))
