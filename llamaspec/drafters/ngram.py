"""Prompt lookup: draft tokens copied from an earlier occurrence of the same tokens.

A copy begins at the longest end of the text that also occurs earlier, in the text itself or in the caller's
prediction. From there on the text is aligned with its source. After an insertion, deletion or replacement the
copy resumes in the same passage. A replacement that was seen once is proposed when the replaced tokens come
next, and a copy is less sure after two tokens at which the text has left its source before. Copies cost
nothing to make; their confidences decide which are verified. `llamaspec bench --task edits` measures them.

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
LONGEST_MATCH = 32  # tokens; longer ones are not told apart
SURE = 8  # strength of an alignment that is not compared with other matches
SWITCH = 12  # tokens of a match elsewhere that an alignment jumps to
BACK, AHEAD = 8, 48  # tokens of the source, around the mismatch, in which the text is looked for
NEAR = 8  # tokens of the source that a text may skip, for each token behind them that matches, but for one
FAR = 48  # lost tokens after which the text is looked for everywhere
LONGEST_REPLACED = 8  # tokens of a replacement
STAYED = 0.5  # times that a text is taken to have stayed with its source, at every place
UNSURE, MUCH = 1.0, 64  # strength of a replacement that was not proposed yet; of a passage, at most


def longest_match(tokens: TokenArray, path: TokenArray, at_least: int) -> tuple[int, int]:
    """The longest end of `path` in `tokens` that something follows, the latest of several.

    Returns its length, at most LONGEST_MATCH, and the index in `tokens` of what follows; (0, 0) for none.
    """
    if len(path) < at_least or len(tokens) <= at_least:
        return 0, 0
    alike = tokens[at_least - 1 : -1] == path[-1]
    for i in range(1, at_least):
        alike &= tokens[at_least - 1 - i : -1 - i] == path[-1 - i]
    ends = np.flatnonzero(alike) + at_least  # [n] index behind each place
    if not len(ends):
        return 0, 0
    length = at_least
    while length < min(LONGEST_MATCH, len(path)):
        longer = ends[np.searchsorted(ends, length, side="right") :]
        longer = longer[tokens[longer - 1 - length] == path[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return length, int(ends[-1])


class Alignment:
    """Where a text follows a source, over insertions, deletions and replacements."""

    def __init__(self, at: int, n_matched: int) -> None:
        self.at = at  # index in the source of the token that is expected next
        self.n_matched = n_matched  # tokens before it that are the same in text and source
        self.n_before = 0  # tokens that matched before the last mismatch
        self.lost: list[int] = []  # tokens of the text since the mismatch at `at`, not found in the source
        self._replacements: dict[int, Replacement] = {}  # by the first of the replaced tokens
        self._open: Replacement | None = None  # that the text is in
        self._n_open = 0  # tokens of it
        self._stays: dict[tuple[int, ...], list[int]] = {}  # by place: times that the text stayed, and left

    def jump(self, at: int, n_matched: int) -> None:
        """Go on elsewhere in the source."""
        self.at, self.n_matched, self.n_before, self.lost, self._open = at, n_matched, 0, [], None

    @property
    def strength(self) -> float:
        """How well text and source agree, as the length of a match."""
        if self.lost:
            return 0.0
        return self.n_matched + min(self.n_before, MUCH) * min(self.n_matched, 2) / 8

    def follow(self, source: TokenArray, token: int) -> None:
        """One more token of the text."""
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
        if replacement is not None:
            written, self._open = replacement.written[: self._n_open], None
            self._replacements.pop(replacement.replaced[0], None)
            if not written and self.at < len(source) and source[self.at] == token:  # it is not replaced here
                self.at, self.n_matched = self.at + 1, self.n_matched + 1
                return
        self.n_before, self.n_matched = max(self.n_matched, self.n_before // 2), 0
        self.lost = [*written, token]
        self._realign(source)

    def continuation(self, source: TokenArray, n: int) -> tuple[TokenArray, Array]:
        """At most `n` tokens that are expected next, and the strength of each: [m] int32, [m] float64."""
        i, strength = self.at, self.strength
        if self.lost:  # as many are taken to be replaced
            i += len(self.lost)
        tokens, strengths = list[int](), list[float]()
        replaced: tuple[int, ...]
        written: tuple[int, ...]
        if self._open is not None:
            tokens += self._open.written[self._n_open :]
            i += len(self._open.replaced)
            strengths += [strength + k for k in range(len(tokens))]
        begin = max(i - 2, 0)
        near = source[begin : i + n].tolist()  # as a list, because each token is looked at
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
        """The replacement of the tokens at index `i` of the source, if one is known."""
        found = self._replacements.get(int(source[i])) if i < len(source) else None
        if found is None or tuple(source[i : i + len(found.replaced)].tolist()) != found.replaced:
            return None
        return found

    def _realign(self, source: TokenArray) -> None:
        """Find the end of the lost tokens in the source: the longest match, less what it skips.

        An insertion skips nothing, or ends like the tokens before it; as many tokens may be replaced.
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
    """The tokens before index `i`, by which a place is known again: two, because one is everywhere."""
    return tuple(source[max(i - 2, 0) : i].tolist())


@dataclass(slots=True)
class Replacement:
    """Tokens of the source, and what the text has in their place."""

    replaced: tuple[int, ...]
    written: tuple[int, ...]
    n_confirmed: int = 0  # times that it was proposed and right


class NgramDrafter:
    """Copies what followed the longest earlier occurrence of the text's end, and follows that passage.

    Matches shorter than `min_match` give no draft. A copy stops after a token that ends texts: `is_end`.
    """

    def __init__(
        self,
        min_match: int = MIN_MATCH,
        *,
        prediction: TokenArray = NO_TOKENS,
        is_end: Callable[[int], bool] = lambda token: False,
    ) -> None:
        self._min_match, self._prediction, self._is_end = min_match, prediction, is_end
        self._read = NO_TOKENS
        self._alignment: Alignment | None = None
        self._source = Source.NGRAM  # of the alignment

    def prepare(self, context: TokenArray) -> None:
        """Note the prompt."""
        self._read = context
        if len(self._prediction):
            self._alignment, self._source = Alignment(0, 0), Source.PREDICTION
            self._alignment.n_before = MUCH

    def propose(self, context: TokenArray, length: SequenceLength) -> Draft:
        """Copy while the policy wants more; a token's confidence is that of the match it would lengthen."""
        if not np.array_equal(context[: len(self._read)], self._read):
            self._alignment = None  # another text
        self._follow(context)
        self._read = context
        alignment = self._alignment
        if alignment is not None and alignment.strength >= SURE and not alignment.lost:
            return self._aligned(alignment, context, length)
        n, begin = longest_match(context, context, self._min_match)
        if alignment is not None and alignment.strength >= max(n, 1):
            return self._aligned(alignment, context, length)
        if not n:
            return (
                Draft(source=Source.NGRAM) if alignment is None else self._aligned(alignment, context, length)
            )
        if alignment is None or (self._source is not Source.NGRAM and n >= SWITCH):
            self._alignment, self._source = Alignment(begin, n), Source.NGRAM
        elif self._source is Source.NGRAM and (n >= SWITCH or len(alignment.lost) > FAR):
            alignment.jump(begin, n)
        # A copy may be copied again: a text that repeats goes on.
        following = np.resize(context[begin : begin + LONGEST_COPY], LONGEST_COPY)
        return self._copied(Source.NGRAM, following, n + np.arange(float(LONGEST_COPY)), length)

    def _follow(self, context: TokenArray) -> None:
        """Align what was written since the last round."""
        alignment = self._alignment
        if alignment is None:
            return
        for i in range(len(self._read), len(context)):
            n = i - len(alignment.lost)  # what follows in the text itself cannot be its source
            source = self._prediction if self._source is Source.PREDICTION else context[:n]
            alignment.follow(source, int(context[i]))
        if len(alignment.lost) > FAR and self._source is Source.PREDICTION:
            self._alignment = None

    def _aligned(self, alignment: Alignment, context: TokenArray, length: SequenceLength) -> Draft:
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
        """Draft the tokens that are expected next, while the policy wants more."""
        end = next((i for i, token in enumerate(following.tolist()) if self._is_end(token)), len(following))
        following, strengths = following[: end + 1], strengths[: end + 1]
        ahead = tuple((strengths / (strengths + 1.0)).tolist())
        n = 0
        while n < len(following) and length.wants_more(
            Draft(following[:n], (), ahead[:n], source, None, ahead[n:])
        ):
            n += 1
        certain = tuple([Distribution.certain(token) for token in following[:n].tolist()])
        return Draft(following[:n], certain, ahead[:n], source)
