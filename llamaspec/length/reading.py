"""When a draft model reads what it has not read of a text.

Prompt processing takes a draft seconds before its first token. So the target writes the first token alone,
and the draft sleeps until it is expected to save more than that. It then processes a short prompt at once,
and a long one in chunks beside the rounds of the target. A chunk has `CHUNK` tokens at least, because on CPUs
each token of a chunk of 32 costs 1.5 times as much as one of 64.
"""

from __future__ import annotations

from llamaspec.length.costs import Costs
from llamaspec.values import CHUNK, UnusedDraft

LITTLE = 64  # tokens that a draft reads without a plan
SHORT = 8  # plain tokens: a prompt that takes the draft longer to process is processed in chunks
WAIT = 4  # it waits for a fourth of the tokens that plain decoding writes meanwhile, at most for 2 * PACE
PACE = 8  # tokens over which the pace of a text is averaged


class DraftReading:
    """What the draft has read of one text, and whether reading the rest is expected to pay."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.n_unread = 0  # tokens, besides the last
        self.is_asleep = False  # it has not read the prompt
        self.is_waking = False  # it reads the prompt beside rounds
        self.unused: UnusedDraft | None = None  # why it has not read the prompt
        self._pace: float | None = None  # seconds of a token, without those of draft models; recently

    @property
    def seconds(self) -> float:
        """To read the rest."""
        return self.n_unread * self._costs.reading_seconds

    def saving(self, n_left: float, plain: float, rate: float) -> float:
        """Seconds that drafts are expected to save in `n_left` tokens.

        `plain`: seconds of a token without drafts; `rate`: tokens per second with them.
        """
        pace = plain if self._pace is None else min(self._pace, plain)
        return max(pace - 1.0 / rate, 0.0) * n_left

    def pays(self, saving: float, plain: float, n_written: int) -> bool:
        """Whether drafts are expected to save more than the draft takes to read the rest.

        Known only after some tokens: where these are copies, no draft is wanted.
        """
        has_waited = n_written >= min(self.seconds / plain / WAIT, 2 * PACE)
        return has_waited and saving > self.seconds

    def begin(self, n_unread: int, saving: float) -> None:
        """Start a completion whose prompt has `n_unread` tokens that the draft has not processed."""
        self.n_unread, self.is_asleep = n_unread, n_unread > LITTLE
        self.sleep_on(saving)

    def sleep_on(self, saving: float) -> None:
        """Keep sleeping: the draft would not earn back its prompt."""
        self.unused = UnusedDraft(self.seconds, saving)

    def wake(self, plain: float) -> int:
        """Wake the draft. Returns the size of the chunk to process beside this round; 0: the whole rest.

        A chunk takes about as long as a plain round.
        """
        self.unused = None
        is_short = self.seconds <= SHORT * plain
        chunk = max(CHUNK, int(plain / self._costs.reading_seconds))
        return 0 if is_short else min(self.n_unread, chunk)

    def learn(self, n_made: int, n_read: int, pace: float, *, drafted: bool, has_read: bool) -> None:
        """A round has ended.

        Parameters
        ----------
        n_made : int
            Tokens that it added to the text.
        n_read : int
            Tokens that the draft has read beside it.
        pace : float
            Seconds of each token, without those of draft models.
        drafted : bool
            There were draft steps: the draft has read all there was.
        has_read : bool
            The draft has also read what the round made.
        """
        self.n_unread = int(not has_read) if drafted else max(self.n_unread - n_read, 0) + n_made
        self.is_asleep &= self.n_unread > LITTLE
        if drafted:
            self.unused = None
        self._pace = (
            pace if self._pace is None else self._pace + (pace - self._pace) * n_made / (n_made + PACE)
        )
