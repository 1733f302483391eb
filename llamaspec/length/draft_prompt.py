"""When the draft model of one completion processes the prompt.

Processing a prompt can take the draft model seconds. So the target generates the first token alone, and the
draft model sleeps until it is expected to save more time than the prompt takes. It then processes a short
prompt at once, and a long one in chunks beside the target's rounds.
"""

from __future__ import annotations

from llamaspec.length.costs import Costs
from llamaspec.values import CHUNK, Attention, Evaluation, Round, UnusedDraft

LITTLE = 64  # tokens: a prompt this short is processed at once, without a decision
SHORT = 8  # plain tokens: a prompt that takes longer is processed in chunks
PACE = 8  # tokens over which the target's pace is averaged
WAIT = 4  # plain decoding comes first, for a fourth of the prompt's time, but at most 2 * PACE tokens


class DraftPrompt:
    """The part of a prompt that the draft model of one completion has not processed yet."""

    def __init__(self, costs: Costs, *, is_winning: bool = False) -> None:
        self._costs = costs
        self.is_winning = is_winning  # drafts were faster when the completion began
        self.n_unread = 0  # tokens that the draft model has not processed, not counting the last
        self.n_to_read = 0  # of these: processed in this round instead of drafting; 0 = all
        self.is_asleep = False  # the prompt is not processed
        self.unused: UnusedDraft | None = None  # why not
        self._pace: float | None = None  # moving average of the target's seconds per token

    @property
    def seconds(self) -> float:
        """Expected seconds of the draft model for the tokens that it has not processed."""
        return self.n_unread * self._costs.reading_seconds

    def start_prompt(self, n_unread: int) -> None:
        """Start a completion whose prompt has `n_unread` tokens that the draft model has not processed."""
        self.n_unread, self.is_asleep = n_unread, n_unread > LITTLE
        self.unused = UnusedDraft(self.seconds, 0.0)

    def wakes(self, plain: float, rate: float, n_written: int, n_left: float) -> bool:
        """Decide whether the draft model processes the prompt now; if not, `unused` says why.

        `plain` is in seconds per token without drafts, `rate` in tokens per second with drafts. The decision
        waits for some tokens: if they are copied, the draft model is not needed.
        """
        pace = plain if self._pace is None else min(self._pace, plain)
        saved = max(pace - 1.0 / rate, 0.0) * n_left
        if n_written >= min(self.seconds / plain / WAIT, 2 * PACE) and saved > self.seconds:
            self.unused = None
            return True
        self.unused = UnusedDraft(self.seconds, saved)
        return False

    def plan_chunk(self, plain: float) -> None:
        """Choose how much of the prompt the draft model processes beside this round.

        A chunk takes about as long as a plain round, but has at least `CHUNK` tokens: on CPUs, each token of
        a chunk of 32 costs 1.5 times as much as one of 64.
        """
        if self.is_asleep and self.seconds > SHORT * plain:
            self.n_to_read = min(self.n_unread, max(CHUNK, int(plain / self._costs.reading_seconds)))

    def observe(self, round_: Round) -> None:
        """Follow what the draft model has processed in a round, and the target's pace."""
        n_made = round_.n_accepted + 1
        if round_.n_priced_steps:  # it drafted, so it had processed everything before
            self.n_unread, self.unused = int(round_.n_drafted < n_made), None
        else:
            n_read = (self.n_to_read or self.n_unread) if round_.draft_seconds else 0
            self.n_unread = max(self.n_unread - n_read, 0) + n_made
        self.is_asleep &= self.n_unread > LITTLE
        self.n_to_read = 0
        pace, usual = (round_.verify_seconds + round_.overhead_seconds) / n_made, self._pace
        self._pace = pace if usual is None else usual + (pace - usual) * n_made / (n_made + PACE)

    def observe_prompt(self, evaluation: Evaluation, seconds: float) -> None:
        """Learn from a prompt chunk that the target processed in an evaluation of its own."""
        if not evaluation.is_disturbed:
            self._costs.observe_prompt(evaluation.width, seconds, evaluation.attention)

    def observe_reading(self, n: int, seconds: float) -> None:
        """Learn from `n` prompt tokens that the draft model processed."""
        self._costs.observe_reading(n, seconds)

    def plain_seconds(self, evaluation: Evaluation) -> float | None:
        """Expected seconds of an evaluation without its drafts; None before one was timed."""
        if not self._costs.n_timed:
            return None
        return self._costs.seconds(evaluation.n_sequences, Attention(evaluation.attention.first))
