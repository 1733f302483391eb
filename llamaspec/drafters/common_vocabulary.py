"""Translation between the target's tokens and those of a draft model.

If the vocabularies differ, the draft model draws only tokens that both have, and processes any other token of
the target as several tokens of its own.

References: token-level intersection (TLI), Timor et al., arXiv 2502.05202.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llamaspec.errors import PairError
from llamaspec.protocols import WholeVocabulary, token_names
from llamaspec.sampling.filters import Scores
from llamaspec.values import NO_TOKENS, TokenArray

LEAST = 0.5  # minimum share of the tokens of typical text that both vocabularies have
NONE = -1  # in place of a token that does not exist
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


class CommonTokens:
    """Vocabularies that have some tokens in common, usually under other ids.

    Raises
    ------
    PairError
        The vocabularies share too few of the tokens of typical text.
    """

    def __init__(self, target: WholeVocabulary, draft: WholeVocabulary) -> None:
        self._target = target
        names = token_names(target)
        of_target, self._of_name = _by_name(names), _by_name(token_names(draft))
        # [V of the target] the draft's token with the same bytes, or NONE
        self.to_draft = np.array([self._of_name.get(name, NONE) for name in names], dtype=np.int32)
        pairs = {of_target[name]: self._of_name[name] for name in of_target.keys() & self._of_name.keys()}
        has_ends = min(target.eos, draft.eos) >= 0
        if has_ends and self.to_draft[target.eos] < 0 and draft.eos not in pairs.values():
            pairs[target.eos] = self.to_draft[target.eos] = draft.eos
        self._in_target = np.array(list(pairs), dtype=np.int32)  # [S]
        self._in_draft = np.array(list(pairs.values()), dtype=np.int32)  # [S]
        # [V of the target] whether the draft can draw it; each token of the draft stands for only one
        self.is_common = np.zeros(len(names), dtype=bool)
        self.is_common[self._in_target] = True
        has_bos = draft.adds_bos and draft.bos >= 0
        self._begin = np.array([draft.bos], dtype=np.int32) if has_bos else NO_TOKENS  # of every sequence
        # A target token is translated to `_n_values` tokens of `_values` from `_place` on; -1: not known yet.
        self._values, self._place = self.to_draft.copy(), np.arange(len(names))
        self._n_values = np.where(self.to_draft >= 0, 1, -1)
        if target.bos >= 0:
            self._add(target.bos, self._begin)
        sample = target.tokenize(SAMPLE.encode(), add_special=False)
        self.of_text = float(self.is_common[sample].mean()) if len(sample) else 0.0
        if self.of_text < LEAST:
            raise PairError(
                f"the draft's vocabulary has only {self.of_text:.0%} of the target's tokens in typical "
                "text; choose a draft of the target's family"
            )

    def translate_each(self, tokens: TokenArray) -> TokenArray:
        """Translate tokens of the target, each by itself: int32 [m]."""
        n = self._n_values[tokens]
        if n.min(initial=1) < 0:
            for token in np.unique(tokens[n < 0]).tolist():
                text = self._target.piece(token) or self._target.specials.get(token, b"")
                self._add(token, self._split(text))
            n = self._n_values[tokens]
        if (n == 1).all():
            known: TokenArray = self._values[self._place[tokens]]
            return known
        ends = n.cumsum()
        places = np.repeat(self._place[tokens] - (ends - n), n)
        translated: TokenArray = self._values[places + np.arange(len(places))]
        return translated

    def translate(self, context: TokenArray) -> TokenArray:
        """Translate a sequence of the target, with the draft's BOS if the draft wants one: int32 [m]."""
        translated = self.translate_each(context)
        has_begin = context[:1].tolist() == [self._target.bos]
        return translated if has_begin else np.concatenate((self._begin, translated))

    def scores(self, logits: Scores) -> Scores:
        """Return the scores of the target's tokens, -inf if the draft lacks one: float32 [V of target]."""
        scores = np.full(len(self.to_draft), -np.inf, dtype=np.float32)
        scores[self._in_target] = logits[self._in_draft]
        return scores

    def drawable(self, tokens: TokenArray) -> TokenArray:
        """Return those of some tokens of the target that the draft can draw."""
        return tokens[self.is_common[tokens]]

    def _add(self, token: int, translated: TokenArray) -> None:
        self._place[token], self._n_values[token] = len(self._values), len(translated)
        self._values = np.concatenate((self._values, translated))

    def _split(self, text: bytes) -> TokenArray:
        """Split text into the draft's tokens, the longest match first; leave out bytes without a token."""
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
    """Return the token of each name. Of several, it is the first; for a single byte, the last.

    A byte token comes before the ordinary token of the same letter.
    """
    known: dict[bytes, int] = {}
    for token, name in enumerate(names):
        if len(name) == 1 or name not in known:
            known[name] = token
    known.pop(b"", None)
    return known
