"""Which tokens of two vocabularies are the same text, and numbers of one in those of the other.

Everything is an array that is made once. Knows no model. tests/drafters/test_token_map.py.

References: token-level intersection (TLI), Timor et al., arXiv 2502.05202.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamaspec.drafters.spelling import Spelling
from llamaspec.sampling.distributions import Scores
from llamaspec.values import NO_TOKENS, TokenArray

NONE = -1  # no such token


class SameTokens:
    """Two vocabularies with the same numbers; one may have more of them at its end.

    Parameters
    ----------
    n_draft, n_target : int
        Tokens of each.
    """

    def __init__(self, n_draft: int, n_target: int) -> None:
        self._n_draft, self._n_target = n_draft, n_target

    def read(self, context: TokenArray) -> TokenArray:
        """The context, with token 0 in place of tokens that only the target knows."""
        if self._n_target <= self._n_draft:
            return context
        return np.where(context < self._n_draft, context, np.int32(0))

    spelled = read

    def scores(self, logits: Scores) -> Scores:
        """The draft's scores of the target's tokens: float32 [V of the target], -inf where it has none."""
        if self._n_target <= self._n_draft:
            return logits[: self._n_target]
        scores = np.full(self._n_target, -np.inf, dtype=np.float32)
        scores[: self._n_draft] = logits
        return scores

    def among(self, tokens: TokenArray) -> TokenArray:
        """Those of some ascending tokens of the target that the draft may draw."""
        return tokens[: np.searchsorted(tokens, self._n_draft)]


class TokenMap:
    """The tokens that target and draft share.

    Parameters
    ----------
    target, draft : Spelling

    Attributes
    ----------
    to_target : [V of the draft] int32
        The token of the target that a draft token means; NONE where it has none. No two mean the same.
    to_draft : [V of the target] int32
        The token of the draft that spells the same; NONE where there is none.
    begin : [n] int32
        What the draft begins every text with.
    """

    def __init__(self, target: Spelling, draft: Spelling) -> None:
        self._draft, self._bos = draft, target.vocabulary.bos
        names = [_names(spelling) for spelling in (target, draft)]
        known_target, known_draft = (_by_name(each) for each in names)
        self.to_draft = np.array([known_draft.get(name, NONE) for name in names[0]], dtype=np.int32)
        self.to_target = np.full(len(names[1]), NONE, dtype=np.int32)
        shared = known_target.keys() & known_draft.keys()
        pairs = np.array([(known_draft[name], known_target[name]) for name in shared], np.int32).reshape(
            -1, 2
        )
        self.to_target[pairs[:, 0]] = pairs[:, 1]
        ends = target.vocabulary.eos, draft.vocabulary.eos
        if min(ends) >= 0 and self.to_draft[ends[0]] < 0 and self.to_target[ends[1]] < 0:
            self.to_draft[ends[0]], self.to_target[ends[1]] = ends[1], ends[0]
        bos = draft.vocabulary.bos if draft.vocabulary.adds_bos and draft.vocabulary.bos >= 0 else None
        self.begin = NO_TOKENS if bos is None else np.array([bos], dtype=np.int32)
        (self._of_draft,) = np.nonzero(self.to_target >= 0)  # [S]
        self._of_target = self.to_target[self._of_draft]  # [S]
        self.is_shared = np.zeros(len(self.to_draft), dtype=bool)  # [V of the target]: the draft may draw it
        self.is_shared[self._of_target] = True
        # How the draft spells each token of the target: so many values from a place on; < 0: not known yet.
        self._values, self._place = self.to_draft.copy(), np.arange(len(self.to_draft))
        self._n_values = np.where(self.to_draft >= 0, 1, -1)
        self._target = target
        if self._bos >= 0:
            self._learn(self._bos, self.begin)

    def spelled(self, tokens: TokenArray) -> TokenArray:
        """Tokens of the target in those of the draft, one by one: int32 [m]."""
        n = self._n_values[tokens]
        if n.min(initial=1) < 0:
            for token in np.unique(tokens[n < 0]).tolist():
                self._learn(token, self._draft.tokens(self._target.spelling(token)))
            n = self._n_values[tokens]
        if (n == 1).all():
            known: TokenArray = self._values[self._place[tokens]]
            return known
        ends = n.cumsum()
        places = np.repeat(self._place[tokens] - (ends - n), n)
        spelled: TokenArray = self._values[places + np.arange(len(places))]
        return spelled

    def read(self, context: TokenArray) -> TokenArray:
        """A whole text of the target in the tokens of the draft: int32 [m]."""
        spelled = self.spelled(context)
        return spelled if context[:1].tolist() == [self._bos] else np.concatenate((self.begin, spelled))

    def scores(self, logits: Scores) -> Scores:
        """The draft's scores of the target's tokens: float32 [V of the target], -inf where it has none."""
        scores = np.full(len(self.to_draft), -np.inf, dtype=np.float32)
        scores[self._of_target] = logits[self._of_draft]
        return scores

    def among(self, tokens: TokenArray) -> TokenArray:
        """Those of some tokens of the target that the draft may draw."""
        return tokens[self.is_shared[tokens]]

    @property
    def noise(self) -> TokenArray:
        """[V of the draft] by which noise a token is drawn: the target's token's, else one of its own."""
        own = len(self.to_draft) + np.arange(len(self.to_target), dtype=np.int32)
        return np.where(self.to_target >= 0, self.to_target, own)

    def specials(self) -> dict[int, TokenArray]:
        """The target's special tokens that the draft has too, and what a text begins with."""
        known = {
            token: self.to_draft[token : token + 1]
            for token in self._target.specials
            if self.to_draft[token] >= 0
        }
        return known | ({self._bos: self.begin} if self._bos >= 0 else {})

    def _learn(self, token: int, spelled: TokenArray) -> None:
        self._place[token], self._n_values[token] = len(self._values), len(spelled)
        self._values = np.concatenate((self._values, spelled))


class Overlap:
    """How well two vocabularies fit, by their tokens and on a text.

    Parameters
    ----------
    target, draft : Spelling
    tokens : TokenMap
    text : bytes
        An ordinary one.
    """

    def __init__(self, target: Spelling, draft: Spelling, tokens: TokenMap, text: bytes) -> None:
        theirs, own = target.tokens(text), draft.tokens(text)
        self.n_shared, self.n_target = int(tokens.is_shared.sum()), len(tokens.is_shared)
        self.of_text = float(tokens.is_shared[theirs].mean())  # share of the target's tokens of the text
        self.n_steps = len(own) / len(theirs)  # draft tokens for each token of the target
        # Share of the draft's tokens that end where a token of the target ends.
        self.whole = float(np.isin(_ends(draft, own), _ends(target, theirs)).mean())


def _ends(spelling: Spelling, tokens: TokenArray) -> npt.NDArray[np.int64]:
    ends: npt.NDArray[np.int64] = np.cumsum([len(spelling.pieces[token]) for token in tokens.tolist()])
    return ends


def _names(spelling: Spelling) -> list[bytes]:
    """[V] what each token is known by: its text, or the name of a special one; empty where it has neither."""
    names = list(spelling.pieces)
    for token, name in spelling.specials.items():
        names[token] = b"\xff" + name  # a byte that no text holds
    return names


def _by_name(names: Sequence[bytes]) -> dict[bytes, int]:
    """The token of each name; of a byte and the same letter, which stands behind it, the letter."""
    known: dict[bytes, int] = {}
    for token, name in enumerate(names):
        if len(name) == 1 or name not in known:
            known[name] = token
    known.pop(b"", None)
    return known
