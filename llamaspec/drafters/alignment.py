"""A sequence that follows a source: what comes next there, across insertions, deletions and replacements.

After a mismatch the copy resumes in the same passage, and a replacement that was seen once is proposed at its
next occurrence. The strength of a token says how well sequence and source agree before it, as the length of a
match; it is low after two tokens at which the sequence has left its source before.
tests/drafters/test_alignment.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from llamaspec.values import TokenArray

Array = npt.NDArray[np.float64]

LONGEST_MATCH = 32  # tokens; longer matches count as this long
BACK, AHEAD = 8, 48  # source tokens before and after a mismatch among which the copy may resume
NEAR = 8  # source tokens that may be skipped for each matching token after them except the first
FAR = 48  # lost tokens after which the copy may resume anywhere
LONGEST_REPLACED = 8  # maximum number of tokens on either side of a replacement
STAYED = 0.5  # prior count of the times that the sequence stayed with its source at a place
UNSURE = 1.0  # maximum strength of a replacement that was never confirmed
MUCH = 64  # maximum number of tokens before a mismatch that count


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
        near = source[begin : self.at + AHEAD + n_lost]
        ends = np.flatnonzero(near == self.lost[-1]) + 1
        window = near.tolist() if len(ends) else []
        best, n_found, resumed = (1.0, -inf), 0, 0
        for j in ends.tolist():
            n = 1
            while n < min(n_lost, j) and window[j - 1 - n] == self.lost[-1 - n]:
                n += 1
            n_skipped = begin + j - n - self.at
            is_usual = n_skipped in (-n, n_lost - n)
            score = n - (0.0 if is_usual else abs(n_skipped) / NEAR), -abs(n_skipped)
            if score >= best:
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
