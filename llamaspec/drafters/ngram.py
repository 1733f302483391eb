"""Prompt lookup: draft tokens copied from an earlier occurrence of the latest tokens.

A copy begins after an earlier occurrence of the longest suffix of the sequence, or with the first token of
the caller's prediction. From then on the sequence is aligned with this source. After an insertion, deletion
or replacement the copy resumes in the same passage, and a replacement that was seen once is proposed at its
next occurrence. Copies cost nothing to make; the confidence of each token decides whether the target verifies
it. Confidence is low after two tokens at which the sequence has left its source before.
`llamaspec bench --task edits` measures copies.

Reference: prompt lookup decoding (Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from llamaspec.protocols import SequenceLength
from llamaspec.values import LONGEST_COPY, NO_TOKENS, Distribution, Draft, Source, TokenArray

Array = npt.NDArray[np.float64]

MIN_MATCH = 2  # tokens; a single token says little about the next
MIN_MATCH_BESIDE_MODEL = 4  # tokens; after a shorter match a draft model guesses better
LONGEST_MATCH = 32  # tokens; longer matches count as this long
SURE = 8  # strength from which an alignment is not compared with other matches
SWITCH = 12  # tokens of a match elsewhere for which the alignment moves there
BACK, AHEAD = 8, 48  # source tokens before and after a mismatch among which the copy may resume
NEAR = 8  # source tokens that may be skipped for each matching token after them except the first
FAR = 48  # lost tokens after which the copy may resume anywhere
LONGEST_REPLACED = 8  # maximum number of tokens on either side of a replacement
STAYED = 0.5  # prior count of the times that the sequence stayed with its source at a place
UNSURE = 1.0  # maximum strength of a replacement that was never confirmed
MUCH = 64  # maximum number of tokens before a mismatch that count


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


class Alignment:
    """The place in a source that a sequence follows, across insertions, deletions and replacements."""

    def __init__(self, at: int, n_matched: int) -> None:
        self.at = at  # index in the source of the token that is expected next
        self.n_matched = n_matched  # tokens before it that are the same in sequence and source
        self.n_before = 0  # tokens that matched before the last mismatch
        self.lost: list[int] = []  # tokens since a mismatch at `at` that were not found in the source
        self._replacements: dict[int, Replacement] = {}  # by the first of the replaced tokens
        self._open: Replacement | None = None  # the replacement that the sequence is writing
        self._n_open = 0  # tokens of it so far
        self._stays: dict[tuple[int, ...], list[int]] = {}  # by place: times that it stayed, and left

    def jump(self, at: int, n_matched: int) -> None:
        """Continue elsewhere in the source."""
        self.at, self.n_matched, self.n_before, self.lost, self._open = at, n_matched, 0, [], None

    @property
    def strength(self) -> float:
        """How well sequence and source agree, as the length of a match."""
        if self.lost:
            return 0.0
        return self.n_matched + min(self.n_before, MUCH) * min(self.n_matched, 2) / 8

    def follow(self, source: TokenArray, token: int) -> None:
        """Add a token of the sequence."""
        if self.lost:
            self.lost.append(token)
            if len(self.lost) <= FAR:
                self._realign(source)
            return
        if self._open is None:
            self._open, self._n_open = self._replacement(source, self.at), 0
        replacement = self._open
        if replacement is not None and replacement.written[self._n_open] == token:
            self._n_open, self.n_matched = self._n_open + 1, self.n_matched + 1
            if self._n_open == len(replacement.written):
                replacement.n_confirmed += 1
                self.at, self._open = self.at + len(replacement.replaced), None
            return
        if replacement is None and self.at < len(source):
            left = bool(source[self.at] != token)
            self._stays.setdefault(_place(source, self.at), [0, 0])[left] += 1
            if not left:
                self.at, self.n_matched = self.at + 1, self.n_matched + 1
                return
        written: Sequence[int] = ()
        if replacement is not None:  # it was wrong
            written, self._open = replacement.written[: self._n_open], None
            self._replacements.pop(replacement.replaced[0], None)
            if not written and self.at < len(source) and source[self.at] == token:  # nothing is replaced here
                self.at, self.n_matched = self.at + 1, self.n_matched + 1
                return
        self.n_before, self.n_matched = max(self.n_matched, self.n_before // 2), 0
        self.lost = [*written, token]
        self._realign(source)

    def continuation(self, source: TokenArray, n: int) -> tuple[TokenArray, Array]:
        """Return up to `n` expected tokens and the strength of each: [m] int32, [m] float64."""
        i, strength = self.at, self.strength
        if self.lost:  # assume that they replace as many tokens
            i += len(self.lost)
        tokens, strengths = list[int](), list[float]()
        replaced: tuple[int, ...]
        written: tuple[int, ...]
        if self._open is not None:
            tokens += self._open.written[self._n_open :]
            i += len(self._open.replaced)
            strengths += [strength + k for k in range(len(tokens))]
        begin = max(i - 2, 0)
        near = source[begin : i + n].tolist()  # a list, because the loop looks at single tokens
        while len(tokens) < n and i < begin + len(near):
            replaced = written = (near[i - begin],)
            replacement = self._replacement(source, i) if replaced[0] in self._replacements else None
            if replacement is None:
                stayed, left = self._stays.get(tuple(near[max(i - 2 - begin, 0) : i - begin]), (0, 0))
                most = (stayed + STAYED) / left if left else inf
            else:
                replaced, written = replacement.replaced, replacement.written
                most = inf if replacement.n_confirmed else UNSURE
            i += len(replaced)
            for token in written:
                strengths.append(min(strength + len(tokens), most))
                tokens.append(token)
        return np.array(tokens[:n], np.int32), np.array(strengths[:n], np.float64)

    def _replacement(self, source: TokenArray, i: int) -> Replacement | None:
        """Return the known replacement of the tokens at index `i` of the source."""
        found = self._replacements.get(int(source[i])) if i < len(source) else None
        if found is None or tuple(source[i : i + len(found.replaced)].tolist()) != found.replaced:
            return None
        return found

    def _realign(self, source: TokenArray) -> None:
        """Continue where the lost tokens end in the source: at the longest match, less what it skips.

        Two distances do not count as skipped: an insertion resumes at the mismatch or repeats the tokens
        before it, and a replacement has as many tokens as it replaces.
        """
        begin, n_lost = max(self.at - BACK, 0), len(self.lost)
        window = source[begin : self.at + AHEAD + n_lost].tolist()
        best, n_found, resumed = (1.0, -inf), 0, 0
        for j in range(1, len(window) + 1):
            n = 0
            while n < min(n_lost, j) and window[j - 1 - n] == self.lost[-1 - n]:
                n += 1
            n_skipped = begin + j - n - self.at
            is_usual = n_skipped in (-n, n_lost - n)
            score = n - (0.0 if is_usual else abs(n_skipped) / NEAR), -abs(n_skipped)
            if n and score >= best:
                best, n_found, resumed = score, n, begin + j
        if not n_found:
            return
        replaced, written = source[self.at : resumed - n_found].tolist(), self.lost[: n_lost - n_found]
        if 0 < len(replaced) <= LONGEST_REPLACED and 0 < len(written) <= LONGEST_REPLACED:
            self._replacements[replaced[0]] = Replacement(tuple(replaced), tuple(written))
        self.at, self.n_matched, self.lost = resumed, n_found, []


def _place(source: TokenArray, i: int) -> tuple[int, ...]:
    """Return the two tokens before index `i`, which identify a place; a single token occurs everywhere."""
    return tuple(source[max(i - 2, 0) : i].tolist())


@dataclass(slots=True)
class Replacement:
    """Tokens of the source, and the tokens that the sequence has in their place."""

    replaced: tuple[int, ...]
    written: tuple[int, ...]
    n_confirmed: int = 0  # times that it was proposed and right


class NgramDrafter:
    """Copies the tokens after the latest occurrence of the longest suffix, and follows that passage.

    A suffix has at least `min_match` tokens. A copy stops after the first token for which `is_end` holds.
    """

    def __init__(
        self,
        min_match: int = MIN_MATCH,
        *,
        prediction: TokenArray = NO_TOKENS,
        is_end: Callable[[int], bool] = lambda token: False,
    ) -> None:
        self._min_match, self._prediction, self._is_end = min_match, prediction, is_end
        self._followed = NO_TOKENS  # the context of the last call
        self._alignment: Alignment | None = None
        self._source = Source.NGRAM  # of the alignment

    def prepare(self, context: TokenArray) -> None:
        """Start with a prompt."""
        self._followed = context
        if len(self._prediction):
            self._alignment, self._source = Alignment(0, 0), Source.PREDICTION
            self._alignment.n_before = MUCH

    def propose(self, context: TokenArray, length: SequenceLength) -> Draft:
        """Copy while the policy wants more; the confidence of a token depends on the match before it."""
        if not np.array_equal(context[: len(self._followed)], self._followed):
            self._alignment = None  # another sequence
        self._follow(context)
        self._followed = context
        alignment = self._alignment
        if alignment is not None and alignment.strength >= SURE:
            return self._aligned(alignment, context, length)
        n, begin = longest_match(context, self._min_match)
        if alignment is not None and alignment.strength >= n:
            return self._aligned(alignment, context, length)
        if not n:
            return Draft(source=Source.NGRAM)
        if alignment is None or (self._source is Source.PREDICTION and n >= SWITCH):
            self._alignment, self._source = Alignment(begin, n), Source.NGRAM
        elif self._source is Source.NGRAM and (n >= SWITCH or len(alignment.lost) > FAR):
            alignment.jump(begin, n)
        # At the end of the context the copy continues with itself: the sequence repeats.
        following = np.resize(context[begin : begin + LONGEST_COPY], LONGEST_COPY)
        return self._copied(Source.NGRAM, following, n + np.arange(float(LONGEST_COPY)), length)

    def _follow(self, context: TokenArray) -> None:
        """Align the tokens that were added since the last call."""
        alignment = self._alignment
        if alignment is None:
            return
        for i in range(len(self._followed), len(context)):
            n = i - len(alignment.lost)  # in the sequence itself, only tokens before this can be the source
            source = self._prediction if self._source is Source.PREDICTION else context[:n]
            alignment.follow(source, int(context[i]))
        if len(alignment.lost) > FAR and self._source is Source.PREDICTION:
            self._alignment = None

    def _aligned(self, alignment: Alignment, context: TokenArray, length: SequenceLength) -> Draft:
        """Copy the continuation of an alignment."""
        source = self._prediction if self._source is Source.PREDICTION else context
        following, strengths = alignment.continuation(source, LONGEST_COPY)
        n_left = len(source) - alignment.at
        if self._source is Source.NGRAM and 0 < n_left <= len(following) < LONGEST_COPY:  # it repeats itself
            more = strengths[-1] + np.arange(1, LONGEST_COPY + 1 - len(following))
            following, strengths = np.resize(following, LONGEST_COPY), np.concatenate((strengths, more))
        return self._copied(self._source, following, strengths, length)

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
