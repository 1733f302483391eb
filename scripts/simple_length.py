"""A simple length policy for the bench: running averages and an argmax, within a regret budget.

Whatever llamaspec/length/ does beyond this must win against it. One average of the acceptance, one of the
seconds for each width, one of a draft step; a round drafts the K with the best predicted speed.
"""

from __future__ import annotations

from llamaspec.values import Draft, Round, Source

LONGEST = 8  # draft tokens
FORGET = 0.05  # weight of the newest measurement
ALLOWED, ALLOWED_RATE = 1.5, 0.02  # plain tokens that may be lost: at first, and for every token
EXPLORE_EVERY = 24  # tokens between two rounds that draft although it does not pay


class SimpleLength:
    """Its own row: made for one text at a time."""

    def __init__(self) -> None:
        self._acceptance, self._step_ratio = 0.6, 0.12  # of a draft token; draft step / plain seconds
        self._seconds: dict[int, float] = {}  # width -> running average
        self._won = ALLOWED  # plain tokens that may be lost
        self._n_since_draft = 0
        self._n_draft = 0  # of the coming round

    def start_sequence(self, *, drops: bool = False) -> SimpleLength:
        """Itself."""
        return self

    def wants_more(self, draft: Draft) -> bool:
        """Until the number that was best when the last round ended."""
        return draft.source is Source.MODEL and len(draft) < self._n_draft

    def n_verified(self, draft: Draft) -> int:
        """All."""
        return len(draft)

    def width(self, n_positions: int) -> int:
        """No padding."""
        return n_positions

    def observe(self, round_: Round) -> None:
        """Average what was measured; choose the next length."""
        n, n_made = round_.n_verified, round_.n_accepted + 1
        known = self._seconds.get(round_.width, round_.verify_seconds)
        self._seconds[round_.width] = known + FORGET * (round_.verify_seconds - known)
        if 1 in self._seconds:
            plain = self._seconds[1]
            self._won += ALLOWED_RATE * n_made
            if n:
                self._won += n_made - round_.seconds / plain
                self._step_ratio += FORGET * (round_.draft_seconds / n / plain - self._step_ratio)
        for accepted in range(min(n_made, n)):
            self._acceptance += FORGET * ((accepted < round_.n_accepted) - self._acceptance)
        self._n_since_draft = 0 if n else self._n_since_draft + n_made
        self._n_draft = self._best() if 1 in self._seconds else 0

    def close(self) -> None:
        """Nothing to do."""

    def _best(self) -> int:
        """The argmax of the predicted speed, among lengths that the budget allows to lose."""
        costs = [self._cost(n + 1) + n * self._step_ratio for n in range(LONGEST + 1)]  # plain tokens
        tokens = [sum(self._acceptance**i for i in range(n + 1)) for n in range(LONGEST + 1)]
        allowed = [n for n in range(LONGEST + 1) if n == 0 or costs[n] - 1.0 <= self._won]
        best = max(allowed, key=lambda n: tokens[n] / costs[n])
        is_due = self._n_since_draft >= EXPLORE_EVERY and 1 in allowed
        return 1 if best == 0 and is_due else best

    def _cost(self, width: int) -> float:
        """Of an evaluation, in plain tokens; straight lines between measured widths and beyond them."""
        below = max(w for w in self._seconds if w <= width)
        above = min((w for w in self._seconds if w > width), default=None)
        plain, known = self._seconds[1], self._seconds[below] / self._seconds[1]
        if above is None:
            return known + (width - below) * ((known - 1.0) / (below - 1) if below > 1 else 0.3)
        part = (width - below) / (above - below)
        return known + part * (self._seconds[above] / plain - known)
