"""Prompt lookup: draft tokens that need no model, because they followed the same tokens before.

The longest end of the text that also occurs earlier is found with a suffix automaton, which grows by
amortised constant time for each token. Editing, summarising and rewriting copy long stretches, and there
such draft tokens cost nothing. Where an earlier text has a longer match, that is copied. Knows no
probabilities. tests/drafters/test_ngram.py compares with plain search.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from llamaspec.drafters.past import LONGEST_COPY, NO_MATCH, Match, PastTexts
from llamaspec.protocols import RowLength
from llamaspec.values import (
    NO_NGRAM_DRAFT,
    NO_STORE_DRAFT,
    NO_TOKENS,
    Distribution,
    Draft,
    TokenArray,
)

MIN_MATCH = 2  # tokens; a single token says little about the next
UNDO = 128  # tokens that can be taken back at once


class SuffixAutomaton:
    """All substrings of a growing sequence, and for its longest repeated end where that occurred before.

    References
    ----------
    Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]  # of each state: token -> state
        self._link = [-1]  # of each state: the state of its longest end that other places share
        self._length = [0]  # of each state: its longest substring
        self._end = [-1]  # of each state: index behind a recent occurrence
        self._last = 0
        self.n_tokens = 0
        self._changes: list[tuple[Any, int, Any]] = []  # by the last token: list or dict, key, value before
        self._undo: deque[tuple[list[tuple[Any, int, Any]], int, int]] = deque(maxlen=UNDO)

    @property
    def n_undo(self) -> int:
        """How many tokens can be taken back."""
        return len(self._undo)

    def pop(self) -> None:
        """Make the sequence one token shorter."""
        changes, n_states, self._last = self._undo.pop()
        for place, key, before in reversed(changes):
            if before is None:
                del place[key]
            else:
                place[key] = before
        for each in (self._next, self._link, self._length, self._end):
            del each[n_states:]
        self.n_tokens -= 1

    @property
    def match_length(self) -> int:
        """Length of the longest end of the sequence that also ends earlier in it."""
        return self._length[self._link[self._last]] if self._last else 0

    @property
    def match_end(self) -> int:
        """Index behind an earlier occurrence of that end."""
        return self._end[self._link[self._last]]

    def append(self, token: int) -> None:
        """Make the sequence one token longer."""
        self._changes = []
        self._undo.append((self._changes, len(self._length), self._last))
        if self._last:
            # What has just been looked up occurs again here: prefer this recent place from now on.
            self._set(self._end, self._link[self._last], self.n_tokens)
        self.n_tokens += 1
        state = self._add(self._length[self._last] + 1, {}, -1, self.n_tokens)
        place = self._last
        while place >= 0 and token not in self._next[place]:
            self._set(self._next[place], token, state)
            place = self._link[place]
        self._link[state] = 0 if place < 0 else self._split(place, token)
        self._last = state

    def _split(self, place: int, token: int) -> int:
        """The state of exactly the longest substring of `place` followed by `token`."""
        known = self._next[place][token]
        if self._length[known] == self._length[place] + 1:
            return known
        copy = self._add(
            self._length[place] + 1, dict(self._next[known]), self._link[known], self._end[known]
        )
        self._set(self._link, known, copy)
        while place >= 0 and self._next[place].get(token) == known:
            self._set(self._next[place], token, copy)
            place = self._link[place]
        return copy

    def _set(self, place: Any, key: int, value: int) -> None:
        self._changes.append((place, key, place.get(key) if isinstance(place, dict) else place[key]))
        place[key] = value

    def _add(self, length: int, following: dict[int, int], link: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._length) - 1


class NgramDrafter:
    """Copies what followed the longest earlier occurrence of the text's end.

    Parameters
    ----------
    min_match : int
        Shorter matches give no draft.
    past : PastTexts, optional
        Earlier texts; this one becomes one of them when it ends.
    """

    def __init__(self, min_match: int = MIN_MATCH, past: PastTexts | None = None) -> None:
        self._min_match = min_match
        self._past = past
        self._read = NO_TOKENS
        self._automaton = SuffixAutomaton()

    def prepare(self, context: TokenArray) -> None:
        """Take in a prompt."""
        n_read = n_same = len(self._read)
        if n_read > len(context) or not bool((self._read == context[:n_read]).all()):
            n_same = _shared(self._read, context)
        if n_read - n_same > self._automaton.n_undo:
            self._automaton, n_same = SuffixAutomaton(), 0
        else:  # what was drafted for a draft may have been rejected
            for _ in range(n_read - n_same):
                self._automaton.pop()
        for token in context[n_same:].tolist():
            self._automaton.append(token)
        self._read = context

    def propose(self, context: TokenArray, length: RowLength) -> Draft:
        """Copy while the policy wants more.

        The confidence of a token is that of the longer match that it would be part of.
        """
        self.prepare(context)
        found, match = NO_MATCH if self._past is None else self._past.find(context), self._match(context)
        draft = _copied(NO_STORE_DRAFT, found, length) if found.length > match.length else NO_STORE_DRAFT
        return draft if len(draft) else _copied(NO_NGRAM_DRAFT, match, length)

    def _match(self, context: TokenArray) -> Match:
        """The longest in the text itself. Copying reaches what it has copied: text that repeats goes on."""
        n, end = self._automaton.match_length, self._automaton.match_end
        if n < self._min_match:
            return NO_MATCH
        return Match(n, np.resize(context[end : end + LONGEST_COPY], LONGEST_COPY))

    def close(self) -> None:
        """The text has ended."""
        if self._past is not None:
            self._past.add(self._read)
            self._past = None


def _copied(draft: Draft, match: Match, length: RowLength) -> Draft:
    """What followed a match, while the policy wants more."""
    nothing, n = draft, match.length
    draft = replace(draft, ahead=tuple([i / (i + 1.0) for i in range(n, n + len(match.following))]))
    for token in match.following.tolist():
        if not length.wants_more(draft):
            break
        draft = draft.plus(token, Distribution.certain(token), draft.ahead[0])
    return draft if len(draft) else nothing


def _shared(a: TokenArray, b: TokenArray) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).nonzero()[0]
    return int(different[0]) if len(different) else n
