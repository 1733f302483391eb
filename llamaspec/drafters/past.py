"""Earlier texts, searched for the end of a text that is being written: what followed there may follow here.

Every four tokens that stand in a row are packed with their place into one number, and the numbers are sorted:
a look-up is a binary search and a comparison backwards from each place. A million tokens are laid out in a
few hundredths of a second. Knows no files. tests/drafters/test_past.py compares with plain search.

References: SuffixDecoding, arXiv 2411.04975, which keeps suffix trees of earlier outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llamaspec.values import NO_TOKENS, TokenArray

MAX_TOKENS = 1 << 20  # of all texts together; older ones are dropped
MIN_MATCH = 4  # tokens; shorter ones stand everywhere in much text
_LONGEST_MATCH = 32  # that is told apart
LONGEST_COPY = 64  # tokens
_PLACES = 64  # that are compared, the latest
_PLACE_BITS = 21  # a text more than MAX_TOKENS, and the gaps
_GAP = -1  # between texts
_PLACE_MASK, _ALL_BITS = (1 << _PLACE_BITS) - 1, (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15


class Match(NamedTuple):
    """Where the end of a text stood before."""

    length: int  # tokens, at most 32
    following: TokenArray  # [n] int32, n >= 1


NO_MATCH = Match(0, NO_TOKENS)


class PastTexts:
    """Texts of one model, the latest last. From any thread.

    Parameters
    ----------
    texts : iterable of [n] int32
        Those of earlier runs.
    max_tokens : int
        The oldest texts are dropped beyond this.
    """

    def __init__(self, texts: Iterable[TokenArray] = (), max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = min(max_tokens, MAX_TOKENS)
        self._lock = threading.Lock()
        self.texts = latest(list(texts), self._max_tokens)
        self.added: tuple[TokenArray, ...] = ()  # since it was made
        self._indices: tuple[_Index, ...] = (_Index.of(self.texts),) if self.texts else ()

    def keep_below(self, n_tokens: int) -> None:
        """Drop texts with token ids that are not below this: they are no texts of the model at hand."""
        texts = tuple(t for t in self.texts if len(t) and t.min() >= 0 and t.max() < n_tokens)
        if len(texts) < len(self.texts):
            self.texts, self._indices = texts, (_Index.of(texts),) if texts else ()

    @property
    def n_tokens(self) -> int:
        """Of all texts."""
        return sum(map(len, self.texts))

    def add(self, text: TokenArray) -> None:
        """A text has ended. It takes the place of those that it goes on from."""
        text = text[-MAX_TOKENS // 4 :].copy()
        if len(text) <= MIN_MATCH:
            return
        with self._lock:
            self.added = latest([*self.added, text], self._max_tokens)
            self.texts = latest([*self.texts, text], self._max_tokens)
            indices, merged, size = list(self._indices), [text], len(text)
            while indices and (last := len(indices[-1].tokens)) < min(2 * size, MAX_TOKENS - size):
                size += last
                merged = [*indices.pop().texts, *merged]
            self._indices = (*indices, _Index.of(merged))

    def find(self, path: TokenArray) -> Match:
        """The longest end of a text that stands in an earlier one, and what followed there; the latest."""
        if len(path) < MIN_MATCH:
            return NO_MATCH
        best = NO_MATCH
        for index in self._indices:
            found = index.find(path)
            if found.length >= best.length:
                best = found
        return best


@dataclass(frozen=True, slots=True, eq=False)
class _Index:
    """Some texts, laid out to be searched."""

    texts: Sequence[TokenArray]
    tokens: TokenArray  # all of them, gaps before, between and behind
    packed: npt.NDArray[np.uint64]  # sorted: hash of four tokens, and the place behind them

    @classmethod
    def of(cls, texts: Sequence[TokenArray]) -> _Index:
        gap = np.full(1, _GAP, np.int32)
        parts = [np.full(_LONGEST_MATCH, _GAP, np.int32)]
        for text in texts:
            parts += [text, gap]
        tokens = np.concatenate(parts).astype(np.int32)
        places = np.arange(MIN_MATCH, len(tokens), dtype=np.uint64)
        windows = [tokens[i : len(tokens) - MIN_MATCH + i] for i in range(MIN_MATCH)]
        is_inside = (tokens[MIN_MATCH:] != _GAP) & (np.minimum.reduce(windows) != _GAP)
        packed = _hashed([window[is_inside] for window in windows]) | places[is_inside]
        packed.sort()
        return cls(texts, tokens, packed)

    def find(self, path: TokenArray) -> Match:
        key = _hash(path[-MIN_MATCH:].tolist())
        bounds = np.array((key, min(key + (1 << _PLACE_BITS), _ALL_BITS)), np.uint64)
        first, last = self.packed.searchsorted(bounds).tolist()
        if first == last:
            return NO_MATCH
        places = (self.packed[max(first, last - _PLACES) : last] & np.uint64(_PLACE_MASK)).astype(np.int64)
        end = path[-_LONGEST_MATCH:][::-1]
        alike = self.tokens[places[:, None] - np.arange(1, len(end) + 1)] == end
        lengths = np.where(alike.all(axis=1), len(end), alike.argmin(axis=1))
        best = len(lengths) - 1 - int(lengths[::-1].argmax())
        if lengths[best] < MIN_MATCH:  # another four tokens with the same hash
            return NO_MATCH
        following = self.tokens[places[best] : places[best] + LONGEST_COPY]
        gaps = np.flatnonzero(following == _GAP)
        return Match(int(lengths[best]), following[: gaps[0]] if len(gaps) else following)


def _hash(tokens: Sequence[int]) -> int:
    """Of four tokens; the lowest bits are free for a place."""
    mixed = 0
    for token in tokens:
        mixed = (mixed ^ token) * _FACTOR & _ALL_BITS
        mixed ^= mixed >> 29
    return mixed & ~_PLACE_MASK


def _hashed(windows: Sequence[TokenArray]) -> npt.NDArray[np.uint64]:
    """The same for tokens at many places: uint64 [n]."""
    mixed = np.zeros(len(windows[0]), np.uint64)
    for window in windows:
        mixed = (mixed ^ window.astype(np.uint64)) * np.uint64(_FACTOR)
        mixed ^= mixed >> np.uint64(29)
    hashed: npt.NDArray[np.uint64] = mixed & np.uint64(_ALL_BITS ^ _PLACE_MASK)
    return hashed


def latest(texts: Sequence[TokenArray], max_tokens: int) -> tuple[TokenArray, ...]:
    """The latest texts that there is room for; of the last one and those it goes on from, the longest."""
    if not texts:
        return ()
    last, others = texts[-1], []
    for text in texts[:-1]:
        n = min(len(text), len(last))
        if bool((text[:n] == last[:n]).all()):
            last = max(text, last, key=len)
        else:
            others.append(text)
    kept, room = [last], max_tokens - len(last)
    for text in reversed(others):
        room -= len(text)
        if room < 0:
            break
        kept.append(text)
    return tuple(reversed(kept))
