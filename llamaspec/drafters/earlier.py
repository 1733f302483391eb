"""Answers to earlier prompts, from which drafts are copied: found by their tokens, or by a similar prompt.

The latest answers are kept in a ring of tokens. A hash table has the places of all runs of MIN_MATCH tokens
in them. A prompt has a signature (MinHash), so that the most similar of thousands of prompts is found in less
than a millisecond. Answers belong to a scope, and are found only in it. Only tokens are kept, in main memory
alone; they may outlive what the KV cache holds of them. tests/drafters/test_earlier.py.

References: hash chains of DEFLATE (RFC 1951, section 4); one permutation hashing (Li, Owen, Zhang, 2012).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llamaspec.drafters.alignment import LONGEST_MATCH, Alignment
from llamaspec.values import TokenArray

Hashes = npt.NDArray[np.uint32]

MIN_MATCH = 4  # tokens
N_TOKENS = 1 << 21  # tokens of all answers: with the tables below, 25 MiB
N_ANSWERS = 4096
LONGEST_ANSWER = 1 << 14  # tokens that are kept of one answer
N_PROMPT = 256  # last tokens of a prompt that are kept with its answer
N_TRIED = 32  # latest places with the same hash that are compared
SIMILAR = 0.55  # least similarity of prompts, from 0 to 1
BEGINNING = 16  # strength at the beginning of the answer to an equal prompt
_TABLE_BITS = 20
_WINDOWS = (24, 96, 2048)  # last tokens of a prompt: the ends of similar prompts are similar, too
_RUN = 3  # tokens
_N_BUCKETS = 32  # of each window's signature
_EMPTY = np.uint32(0xFFFFFFFF)


class EarlierText(NamedTuple):
    """The end of an earlier prompt and its answer, and a place in the answer."""

    text: TokenArray  # [n]
    at: int  # index of the token that is expected next
    n_matched: int  # tokens before it that are the same as in the sequence
    similarity: float = 0.0  # of the prompts, from 0 to 1, if it was found by its prompt


class EarlierAnswers:
    """The latest answers of a pair, in bounded memory. Only the compute thread uses it."""

    def __init__(self, n_tokens: int = N_TOKENS, n_answers: int = N_ANSWERS) -> None:
        self._tokens = np.zeros(n_tokens, np.int32)
        self._owners = np.zeros(n_tokens, np.int16)  # 1 + row of the answer, 0 = none
        self._previous = np.zeros(n_tokens, np.int32)  # an earlier place with the same hash, 0 = none
        self._table = np.zeros(1 << _TABLE_BITS, np.int32)  # by hash: the place after its latest occurrence
        self._starts = np.zeros(n_answers, np.int64)  # of each row, counted from the first token ever kept
        self._begins = np.zeros(n_answers, np.int64)  # its place in the ring
        self._n_prompts = np.zeros(n_answers, np.int64)  # tokens of the prompt
        self._ends = np.zeros(n_answers, np.int64)
        self._scopes = np.zeros(n_answers, np.int64)
        self._signatures = np.zeros((n_answers, len(_WINDOWS) * _N_BUCKETS), np.uint32)
        self._n_kept, self._n_dropped = 0, 0  # answers, ever; row i has the answer i modulo their number
        self._next = 0  # tokens ever kept, and places that were skipped

    def of(self, scope: str) -> ScopedAnswers:
        """Return the answers of a scope. Only a hash of its name is kept, because that may be an API key."""
        return ScopedAnswers(self, hash(scope))

    def __len__(self) -> int:
        return self._n_kept - self._n_dropped

    def add(self, prompt: TokenArray, answer: TokenArray, scope: int = 0) -> None:
        """Keep an answer; the oldest ones make room."""
        if len(answer) < MIN_MATCH:
            return
        context = prompt[-N_PROMPT:]
        text = np.concatenate((context, answer[: min(LONGEST_ANSWER, len(self._tokens) // 2)]))
        if len(text) > len(self._tokens):
            return
        start, size = self._next, len(self._tokens)
        if start % size + len(text) > size:  # a text lies in one piece
            start += size - start % size
        row = self._n_kept % len(self._starts)
        while len(self) and (
            len(self) == len(self._starts)
            or self._starts[self._n_dropped % len(self._starts)] < start + len(text) - size
        ):
            self._drop_oldest()
        begin = start % size
        self._tokens[begin : begin + len(text)] = text
        self._owners[begin : begin + len(text)] = row + 1
        self._starts[row], self._begins[row], self._ends[row] = start, begin, begin + len(text)
        self._n_prompts[row], self._scopes[row] = len(context), scope
        self._signatures[row] = _signature(prompt)
        self._index(text[len(context) : -1], begin + len(context), scope)
        self._n_kept, self._next = self._n_kept + 1, start + len(text)

    def clear(self) -> None:
        """Drop all answers."""
        while len(self):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        row = self._n_dropped % len(self._starts)
        self._owners[self._begins[row] : self._ends[row]] = 0
        self._scopes[row], self._n_dropped = 0, self._n_dropped + 1

    def _index(self, tokens: TokenArray, begin: int, scope: int) -> None:
        """Enter all runs of some tokens, which lie at `begin`, into the hash table."""
        if len(tokens) < MIN_MATCH:
            return
        buckets = _buckets(tokens, scope)
        places = np.arange(begin + MIN_MATCH, begin + len(tokens) + 1, dtype=np.int32)
        order = buckets.argsort(kind="stable")
        buckets, places = buckets[order], places[order]
        is_first = np.concatenate(([True], buckets[1:] != buckets[:-1]))
        before = np.concatenate((places[:1], places[:-1]))
        self._previous[places] = np.where(is_first, self._table[buckets], before)
        is_last = np.concatenate((is_first[1:], [True]))
        self._table[buckets[is_last]] = places[is_last]

    def longest_match(self, tokens: TokenArray, more_than: int, scope: int = 0) -> EarlierText | None:
        """Find the longest end of `tokens` that also occurs within an answer; the latest of several.

        None if no match has more than `more_than` tokens, and at least MIN_MATCH.
        """
        n_least = max(more_than + 1, MIN_MATCH)
        if not len(self) or not n_least <= min(len(tokens), LONGEST_MATCH):
            return None
        end = tokens[-LONGEST_MATCH:][::-1]  # the last token first
        place = int(self._table[_buckets(tokens[-MIN_MATCH:], scope)[0]])
        tried = list[int]()
        while place and len(tried) < N_TRIED:
            tried.append(place)
            place = int(self._previous[place])
        if not tried:
            return None
        places = np.array(tried)
        rows = self._owners[places] - 1
        before = self._tokens[places[:, None] - 1 - np.arange(len(end))]  # [n, LONGEST_MATCH]
        differs = before != end
        lengths = np.where(differs.any(axis=1), differs.argmax(axis=1), len(end))
        lengths = np.minimum(lengths, places - self._begins[rows] - self._n_prompts[rows])
        lengths[(rows < 0) | (self._scopes[rows] != scope)] = 0
        best = int(lengths.argmax())  # the first is the latest
        if lengths[best] < n_least:
            return None
        row = int(rows[best])
        return EarlierText(self._text(row), tried[best] - int(self._begins[row]), int(lengths[best]))

    def most_similar(self, prompt: TokenArray, scope: int = 0) -> EarlierText | None:
        """Find the beginning of the answer to the most similar prompt; the latest of several.

        None if no prompt is similar enough.
        """
        if not len(self):
            return None
        signature = _signature(prompt)
        is_full = (signature != _EMPTY).reshape(len(_WINDOWS), -1)
        weights = is_full / is_full.sum(1, keepdims=True).clip(1) / len(_WINDOWS)
        n = min(self._n_kept, len(self._starts))
        similar = (self._signatures[:n] == signature) @ weights.reshape(-1).astype(np.float32)  # [n]
        similar[self._scopes[:n] != scope] = 0.0
        rows = np.arange(self._n_kept - 1, self._n_dropped - 1, -1) % len(self._starts)  # the latest first
        row = int(rows[similar[rows].argmax()])
        if similar[row] < SIMILAR:
            return None
        return EarlierText(self._text(row), int(self._n_prompts[row]), 0, float(similar[row]))

    def _text(self, row: int) -> TokenArray:
        """Return a copy of the text in a row: its place may be reused while a sequence follows it."""
        return self._tokens[self._begins[row] : self._ends[row]].copy()


@dataclass(frozen=True, slots=True, eq=False)
class ScopedAnswers:
    """The answers of one scope: the methods of `EarlierAnswers`, for this scope."""

    answers: EarlierAnswers
    scope: int

    def add(self, prompt: TokenArray, answer: TokenArray) -> None:
        """Keep an answer."""
        self.answers.add(prompt, answer, self.scope)

    def longest_match(self, tokens: TokenArray, more_than: int) -> EarlierText | None:
        """Find the longest end of `tokens` that also occurs in an answer."""
        return self.answers.longest_match(tokens, more_than, self.scope)

    def most_similar(self, prompt: TokenArray) -> EarlierText | None:
        """Find the answer to the most similar prompt."""
        return self.answers.most_similar(prompt, self.scope)

    def beginning(self, prompt: TokenArray) -> tuple[TokenArray, Alignment] | None:
        """Return the text of the most similar prompt with its answer, aligned with a prompt to its end.

        A name or number that differs between the prompts will probably differ in the answers, too.
        """
        found = self.most_similar(prompt)
        if found is None:
            return None
        alignment = Alignment(0, 0)
        for token in prompt[-N_PROMPT:].tolist():
            alignment.follow(found.text, token)
        if alignment.at == found.at:  # how much of the prompts' ends matched says little
            share = (found.similarity - SIMILAR) / (1 - SIMILAR)
            alignment.n_matched, alignment.n_before = round(BEGINNING * share), 0
        return found.text, alignment


def _hashes(tokens: TokenArray, run: int) -> Hashes:
    """Return the hash of each run of tokens: [n - run + 1]."""
    n = len(tokens) - run + 1
    made = np.zeros(n, np.uint32)
    for i in range(run):
        made = made * np.uint32(0x9E3779B1) + tokens[i : i + n].astype(np.uint32)
    made ^= made >> np.uint32(15)
    made *= np.uint32(0x85EBCA6B)
    return made ^ made >> np.uint32(13)


def _buckets(tokens: TokenArray, scope: int) -> Hashes:
    """Return the place in the hash table of each run of tokens: [n - MIN_MATCH + 1].

    Each scope has others, so that many answers of one do not hide those of another.
    """
    return (_hashes(tokens, MIN_MATCH) ^ np.uint32(scope & 0xFFFFFFFF)) >> np.uint32(32 - _TABLE_BITS)


def _signature(prompt: TokenArray) -> Hashes:
    """Return the least hash in each bucket, for each window at the end of a prompt."""
    made = np.full((len(_WINDOWS), _N_BUCKETS), _EMPTY)
    if len(prompt) >= _RUN:
        hashes = _hashes(prompt[-max(_WINDOWS) :], _RUN)
        for least, window in zip(made, _WINDOWS, strict=True):
            last = hashes[-(window - _RUN + 1) :]
            np.minimum.at(least, last % _N_BUCKETS, last)
    return made.reshape(-1)
