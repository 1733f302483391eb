"""What the automatic lengths of all completions of a pair share and learn.

Each completion plans its rounds from this (`AutoSequence`), and reports them. Knows no model and no clock:
the same rounds give the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from llamaspec.length.costs import TIMED, Costs
from llamaspec.length.estimates import Acceptance, Array
from llamaspec.length.prior import NEAREST, Gain, LearnedPrior
from llamaspec.values import COPIES, Round, Source

FREE = COPIES | {Source.GRAMMAR}  # sources that need no draft step
SHARE, CREDIT = 0.015, 2.0  # budget for timing and exploring: share of all time; plain tokens at first
STALLED = 1.3  # relative to an evaluation, an estimate of a plain one that cannot be right
CHANGED = 0.1  # relative change of plain decoding after which it is timed again soon
USUAL = 256.0  # tokens of a completion, before any has ended
CAUTION = 0.5  # share of the usual length to count on, because completions end by chance
REMEMBERED = 6  # completions in the average length: requests of a kind follow each other
FARTHEST = 512  # maximum rounds between two explorations


@dataclass(slots=True)
class Exploration:
    """When to try an alternative that is expected to lose: at distances that double while it loses."""

    distance: int = NEAREST
    n_since: int = 0  # rounds since the last try

    def is_due(self) -> bool:
        """Whether enough rounds have passed."""
        return self.n_since >= self.distance

    def reset(self) -> None:
        """Explore often again: the alternative wins now."""
        self.distance = NEAREST

    def learn(self, *, paid: bool) -> None:
        """Record the result of a try."""
        self.distance = max(NEAREST, self.distance // 2) if paid else min(2 * self.distance, FARTHEST)
        self.n_since = 0


@dataclass(slots=True)
class RoundPlan:
    """Costs and purpose of a completion's next round."""

    plain: float  # seconds per token without drafts
    step: float  # seconds of a draft step
    rate: float = 1.0  # expected tokens per second: the price of time
    prices: Array = field(default_factory=lambda: np.zeros(1))  # [1 + n] seconds of 0, 1, ... verified tokens
    limits: dict[Source, int] = field(default_factory=dict)  # maximum number of draft tokens
    explored: Source | None = None  # the source that is tried although it is expected to lose
    times_plain: bool = False  # nothing is drafted, because plain decoding is timed again
    timed_width: int | None = None  # the evaluation is padded to this width, to time it


class Shared:
    """Costs, acceptance and gains, and the time that may be spent on learning more; see `AutoLength`."""

    def __init__(
        self, prior: LearnedPrior, longest: int, sources: frozenset[Source], *, pads: bool = True
    ) -> None:
        self.costs = Costs(prior.curve, pads=pads)
        self.longest, self.sources = longest, sources
        # The source whose tokens need draft steps
        self.drafting = min(self.sources - FREE, key=list(Source).index, default=Source.MODEL)
        self.acceptance = {source: Acceptance(is_copied=source in COPIES) for source in Source}
        self.acceptance[self.drafting] = Acceptance(prior.log_odds, prior.counts)
        self.acceptance[Source.NGRAM] = Acceptance(prior.copy_log_odds, prior.copy_counts, is_copied=True)
        self.acceptance[Source.EARLIER] = Acceptance(
            prior.earlier_log_odds, prior.earlier_counts, is_copied=True
        )
        self.drafts, self.plain = Exploration(prior.distance), Exploration()  # each while the other is used
        self._earlier = prior.gain.faded()
        self._n_tokens = self._seconds = self._plain_seconds = 0.0  # of this run; see `Gain`
        self.credit = 0.0  # seconds that timing and exploring may cost now
        self.n_sequences = 0  # open completions
        self.is_winning = False  # drafts were faster in the latest decision
        self.usual_length = USUAL  # tokens of a completion
        self.on_work: Callable[[float], object] = _ignore  # receives the seconds of each round
        self._latest = -1  # serial number of the latest evaluation
        self._verify_seconds = 0.0  # of that, without a stall

    @property
    def counted_length(self) -> float:
        """Tokens of a completion to count on: for a short answer, processing the prompt does not pay."""
        return CAUTION * self.usual_length

    def learn_length(self, n_written: int, max_tokens: int | None) -> None:
        """Learn the usual length from a completion, unless a limit may have made it shorter.

        A limit below what is counted on belongs to requests of another kind, such as those of editors.
        """
        limit = self.usual_length if max_tokens is None else max_tokens
        was_cut = max_tokens is not None and n_written >= max_tokens
        if n_written and limit >= (self.usual_length if was_cut else self.counted_length):
            self.usual_length += (n_written - self.usual_length) / REMEMBERED

    def experience(self) -> LearnedPrior:
        """Return what the next run should start with."""
        drafts, copies, earlier = (
            self.acceptance[source] for source in (self.drafting, Source.NGRAM, Source.EARLIER)
        )
        return LearnedPrior(
            self.costs.learned(),
            tuple(drafts.log_odds.tolist()),
            self.drafts.distance,
            tuple(copies.log_odds.tolist()),
            counts=drafts.counts,
            copy_counts=copies.counts,
            earlier_log_odds=tuple(earlier.log_odds.tolist()),
            earlier_counts=earlier.counts,
            gain=self._earlier.plus(Gain(self._n_tokens, self._seconds, self._plain_seconds)),
        )

    def learn(self, round_: Round, plan: RoundPlan, *, paid: bool, n_unread: int, depth: float) -> float:
        """Learn from a round of a completion; an evaluation that several share is learnt once.

        `paid`: a draft token was accepted. `n_unread`: tokens that the draft model also had to process.
        `depth`: cached tokens that a position attended to. Returns the seconds of drafting and verifying
        without a stall of the machine, as the costs judge them. Only these count for budget and gain, and
        without overhead, which plain rounds have, too.
        """
        n_made, n_steps = round_.n_accepted + 1, round_.n_priced_steps
        drafting = self.costs.observe_draft(n_steps, n_unread, round_.draft_seconds, depth)
        if round_.evaluation != self._latest or round_.n_sequences == 1:
            self._verify_seconds = self._learn_costs(round_)
        spent = drafting + self._verify_seconds
        seconds = spent / round_.n_sequences
        self.credit += SHARE * (seconds + min(round_.overhead_seconds, seconds))
        if plan.times_plain:
            self.plain.n_since = 0
        if plan.explored is self.drafting or plan.timed_width is not None:
            self.credit -= max(seconds - n_made * plan.plain, 0.0)
        if n_steps and plan.explored is self.drafting:
            self.drafts.learn(paid=paid)
        plain = round_.plain_seconds
        # No round takes less than a plain one: a longer estimate is from a stall that nothing has corrected.
        if plain is not None and not round_.verified_in.n_prefill and plain <= STALLED * self._verify_seconds:
            self._n_tokens += n_made
            self._seconds += seconds
            self._plain_seconds += n_made * plain / round_.n_sequences
        self.on_work(seconds)
        return spent

    def _learn_costs(self, round_: Round) -> float:
        """Learn from the evaluation of a round; return its seconds without a stall."""
        self._latest = round_.evaluation
        self.drafts.n_since += 1
        self.plain.n_since += 1
        seen = round_.verified_in
        if seen.n_prefill:  # the seconds without the prompt chunk are unknown
            return min(round_.verify_seconds, self.costs.seconds(seen.width - seen.n_prefill, seen.attention))
        before = self.costs.seconds(seen.width, seen.attention)
        credible = self.costs.observe_verify(
            seen.width, round_.verify_seconds, seen.attention, is_disturbed=seen.is_disturbed
        )
        if self.costs.n_timed == TIMED:
            self.credit = CREDIT * self.costs.seconds(1)
        if round_.width == round_.n_sequences:
            self.plain.learn(
                paid=abs(self.costs.seconds(seen.width, seen.attention) / before - 1.0) > CHANGED
            )
        elif self.costs.is_surprised:  # does plain decoding take longer, too?
            self.plain.n_since = FARTHEST
        return credible


def _ignore(_seconds: float) -> None: ...
