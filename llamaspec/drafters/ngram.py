"""Prompt lookup: draft tokens that need no model, because they followed the same tokens before.

The longest end of the text that also occurs earlier is found with a suffix automaton, which grows by
amortised constant time for each token. Editing, summarising and rewriting copy long stretches, and there
such draft tokens cost nothing. Knows no probabilities. tests/drafters/test_ngram.py compares with plain
search.
"""

from __future__ import annotations

from llamaspec.protocols import RowLength
from llamaspec.values import NO_NGRAM_DRAFT, NO_TOKENS, Distribution, Draft, TokenArray

MIN_MATCH = 2  # tokens; a single token says little about the next


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
        if self._last:
            # What has just been looked up occurs again here: prefer this recent place from now on.
            self._end[self._link[self._last]] = self.n_tokens
        self.n_tokens += 1
        state = self._add(self._length[self._last] + 1, {}, -1, self.n_tokens)
        place = self._last
        while place >= 0 and token not in self._next[place]:
            self._next[place][token] = state
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
        self._link[known] = copy
        while place >= 0 and self._next[place].get(token) == known:
            self._next[place][token] = copy
            place = self._link[place]
        return copy

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
    """

    def __init__(self, min_match: int = MIN_MATCH) -> None:
        self._min_match = min_match
        self._read = NO_TOKENS
        self._automaton = SuffixAutomaton()

    def prepare(self, context: TokenArray) -> None:
        """Take in a prompt."""
        n_read = len(self._read)
        if n_read > len(context) or not bool((self._read == context[:n_read]).all()):
            self._automaton, n_read = SuffixAutomaton(), 0
        for token in context[n_read:].tolist():
            self._automaton.append(token)
        self._read = context

    def propose(self, context: TokenArray, length: RowLength) -> Draft:
        """Copy while the policy wants more.

        The confidence of a token is that of the longer match that it would be part of.
        """
        self.prepare(context)
        draft, match = NO_NGRAM_DRAFT, self._automaton.match_length
        if match < self._min_match:
            return draft
        source = self._automaton.match_end
        while source < len(context) and length.wants_more(draft):
            token = int(context[source])
            draft = draft.plus(token, Distribution.certain(token), match / (match + 1.0))
            source, match = source + 1, match + 1
        return draft
