"""How many copies of earlier text to verify: copying costs nothing, the evaluation does.

Copies have chances of their own, learnt from the length of the match, apart from the draft model's.
Knows neither tokens nor where copies come from. tests/rules/test_copies.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from llamaspec.rules.calibration import KNOTS, Sighted
from llamaspec.rules.planning import Prices
from llamaspec.values import Draft, Round

START_LEVELS = tuple(0.9 * log(k / (1 - k)) - 0.8 for k in KNOTS)  # log-odds: a match of 2 goes on in 46 %
HOPE = 1.0  # standard deviations of luck that a copy is granted where no other guesses pay
HOPELESS = 0.02  # guesses behind a chance like this are not worth a thought
PATIENCE, MOST_PATIENCE = 8, 256  # refusals in a row until copies are tried all the same


class Copies:
    """What is known of copied guesses."""

    def __init__(self) -> None:
        self._chances = Sighted(START_LEVELS)
        self._n_refused, self._patience = 0, PATIENCE
        self._is_refused = False
        self.n_judged = self.n_accepted = 0

    def n_worth(self, draft: Draft, prices: Prices, dear: Sequence[float], rate: float, room: float) -> int:
        """The number whose evaluation brings most; 0 where another round, or a plain one, brings more.

        Parameters
        ----------
        draft : Draft
            Copies.
        prices : Prices
        dear : [longest + 1]
            Seconds of an evaluation that judges 0, 1, ... guesses, if it is dearer than believed.
        rate : float
            Tokens per second that time is worth otherwise.
        room : float
            Plain tokens that may be lost if no copy stands.
        """
        if not len(draft):
            return 0
        batch, plain = prices.batch_seconds, prices.plain_seconds
        limit = min(len(draft), prices.longest)
        while limit and (dear[limit] - batch[0]) / plain > room:
            limit -= 1
        others_win = rate * plain - 1.0  # tokens that another round brings in the time of a plain one
        luck = 0.0 if others_win > 0 else HOPE
        n_best, best, tokens, standing = 0, others_win, 0.0, 1.0
        for n, confidence in enumerate(draft.confidences[:limit], start=1):
            standing *= self._chances.bound(confidence, luck)
            if standing < HOPELESS:
                break
            tokens += standing
            value = tokens - rate * (batch[n] - batch[0])
            if value > best:
                n_best, best = n, value
        self._is_refused = n_best == 0 and limit > 0
        return 1 if self._is_refused and self._n_refused >= self._patience else n_best

    def observe(self, round_: Round) -> None:
        """Learn from a round, whoever guessed."""
        if round_.is_copy:
            self._judge(round_)
        self._n_refused = self._n_refused + 1 if self._is_refused and not round_.is_copy else 0
        self._is_refused = False
        self._chances.pass_tokens(round_.n_accepted + 1)

    def _judge(self, round_: Round) -> None:
        n_judged = min(round_.n_accepted + 1, round_.n_verified)
        for i, confidence in enumerate(round_.confidences[:n_judged]):
            self._chances.judge(confidence, i < round_.n_accepted)
        self.n_judged += n_judged
        self.n_accepted += round_.n_accepted
        if round_.n_accepted:
            self._patience = PATIENCE
        elif self._is_refused:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
