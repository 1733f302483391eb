"""Drafts with a heterogeneous vocabulary: the tokens shared with the target, and their ids in both.

The draft model samples from the shared tokens only. It reads any other target token as several of its own.

References: token-level intersection (TLI), Timor et al., arXiv 2502.05202.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llamaspec.errors import PairError
from llamaspec.protocols import WholeVocabulary, token_names
from llamaspec.sampling.filters import Scores
from llamaspec.values import NO_TOKENS, TokenArray

LEAST = 0.5  # share of the tokens of typical text that both vocabularies must have
NONE = -1  # no such token
SAMPLE = """\
def mean(values: list[float]) -> float:
    \"\"\"The arithmetic mean of 2 or more values.\"\"\"
    if len(values) < 2:
        raise ValueError(f"got {len(values)} values, want 2 or more")
    return sum(values) / len(values)

The committee met again on Thursday, but it didn't reach a decision: 14 of its 23 members wanted to wait until
the engineers' report (about 1,250 pages) had been translated. "We have time," said the chairwoman.

{"name": "Ada", "born": 1815, "tags": ["first", "second"], "active": true}
"""


class SameTokens:
    """Vocabularies of `n_draft` and `n_target` tokens with the same ids; one may have more at its end."""

    def __init__(self, n_draft: int, n_target: int) -> None:
        self._n_draft, self._n_target = n_draft, n_target

    def read(self, context: TokenArray) -> TokenArray:
        """The context, with token 0 in place of tokens that only the target has."""
        if self._n_target <= self._n_draft:
            return context
        return np.where(context < self._n_draft, context, np.int32(0))

    spelled = read

    def scores(self, logits: Scores) -> Scores:
        """The draft's scores of the target's tokens: float32 [V of the target], -inf if it has none."""
        if self._n_target <= self._n_draft:
            return logits[: self._n_target]
        scores = np.full(self._n_target, -np.inf, dtype=np.float32)
        scores[: self._n_draft] = logits
        return scores

    def among(self, tokens: TokenArray) -> TokenArray:
        """Select the tokens of the target, in ascending order, that the draft may draw."""
        return tokens[: np.searchsorted(tokens, self._n_draft)]


class CommonTokens:
    """The tokens that target and draft have in common.

    Raises
    ------
    PairError
        Too few of the tokens of typical text are shared.
    """

    def __init__(self, target: WholeVocabulary, draft: WholeVocabulary) -> None:
        self._target, self._target_bos = target, target.bos
        names = token_names(target)
        of_target, self._of_name = _by_name(names), _by_name(token_names(draft))
        # [V of the target] the draft's token with the same text, or NONE
        self.to_draft = np.array([self._of_name.get(name, NONE) for name in names], dtype=np.int32)
        pairs = {of_target[name]: self._of_name[name] for name in of_target.keys() & self._of_name.keys()}
        has_ends = min(target.eos, draft.eos) >= 0
        if has_ends and self.to_draft[target.eos] < 0 and draft.eos not in pairs.values():
            pairs[target.eos] = self.to_draft[target.eos] = draft.eos
        self._in_target = np.array(list(pairs), dtype=np.int32)  # [S]
        self._in_draft = np.array(list(pairs.values()), dtype=np.int32)  # [S]
        # [V of the target] whether the draft may draw it: no two are the same token of the draft
        self.is_common = np.zeros(len(names), dtype=bool)
        self.is_common[self._in_target] = True
        has_bos = draft.adds_bos and draft.bos >= 0
        self.begin = np.array([draft.bos], dtype=np.int32) if has_bos else NO_TOKENS  # of every sequence
        # The draft's tokens for a target token: `_n_values` of `_values` from `_place`; < 0: not computed.
        self._values, self._place = self.to_draft.copy(), np.arange(len(names))
        self._n_values = np.where(self.to_draft >= 0, 1, -1)
        if self._target_bos >= 0:
            self._learn(self._target_bos, self.begin)
        sample = target.tokenize(SAMPLE.encode(), add_special=False)
        self.of_text = float(self.is_common[sample].mean()) if len(sample) else 0.0
        if self.of_text < LEAST:
            raise PairError(
                f"the draft's vocabulary has only {self.of_text:.0%} of the target's tokens in typical "
                "text; choose a draft of the target's family"
            )

    def spelled(self, tokens: TokenArray) -> TokenArray:
        """Translate tokens of the target into the draft's, one by one: int32 [m]."""
        n = self._n_values[tokens]
        if n.min(initial=1) < 0:
            for token in np.unique(tokens[n < 0]).tolist():
                text = self._target.piece(token) or self._target.specials.get(token, b"")
                self._learn(token, self._greedy(text))
            n = self._n_values[tokens]
        if (n == 1).all():
            known: TokenArray = self._values[self._place[tokens]]
            return known
        ends = n.cumsum()
        places = np.repeat(self._place[tokens] - (ends - n), n)
        spelled: TokenArray = self._values[places + np.arange(len(places))]
        return spelled

    def read(self, context: TokenArray) -> TokenArray:
        """Translate a whole sequence of the target into the draft's tokens: int32 [m]."""
        spelled = self.spelled(context)
        has_begin = context[:1].tolist() == [self._target_bos]
        return spelled if has_begin else np.concatenate((self.begin, spelled))

    def scores(self, logits: Scores) -> Scores:
        """The draft's scores of the target's tokens: float32 [V of the target], -inf if it has none."""
        scores = np.full(len(self.to_draft), -np.inf, dtype=np.float32)
        scores[self._in_target] = logits[self._in_draft]
        return scores

    def among(self, tokens: TokenArray) -> TokenArray:
        """Select the tokens of the target that the draft may draw."""
        return tokens[self.is_common[tokens]]

    def _learn(self, token: int, spelled: TokenArray) -> None:
        self._place[token], self._n_values[token] = len(self._values), len(spelled)
        self._values = np.concatenate((self._values, spelled))

    def _greedy(self, text: bytes) -> TokenArray:
        """Split text into the draft's tokens, the longest match first; bytes without a token are left out."""
        found: list[int] = []
        begin = 0
        while begin < len(text):
            fits = (end for end in range(len(text), begin, -1) if text[begin:end] in self._of_name)
            end = next(fits, None)
            if end is not None:
                found.append(self._of_name[text[begin:end]])
            begin = end or begin + 1
        return np.array(found, dtype=np.int32)


def _by_name(names: list[bytes]) -> Mapping[bytes, int]:
    """The token of each name; of a byte and the same letter, which comes after it, the letter."""
    known: dict[bytes, int] = {}
    for token, name in enumerate(names):
        if len(name) == 1 or name not in known:
            known[name] = token
    known.pop(b"", None)
    return known
