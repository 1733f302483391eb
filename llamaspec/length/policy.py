"""Drafts as many tokens as speed things up: what all completions of a pair share and learn.

Each completion plans its rounds from that (`AutoSequence`). A draft that could win but does not is explored
now and then. Knows no model and no clock: the same rounds give the same decisions. tests/simulator.py.
"""

from __future__ import annotations

from collections.abc import Collection

from llamaspec.length.acceptance import (
    FARTHEST,
    MOST,
    SETTLED,
    Acceptance,
    Exploration,
    LearnedPrior,
)
from llamaspec.length.costs import CostCurve, Costs
from llamaspec.length.sequence import FREE, TIMED, AutoSequence, RoundPlan
from llamaspec.length.tree import TreeAcceptance
from llamaspec.values import COPIES, Round, Source

SHARE, CREDIT = 0.015, 2.0  # budget of timings and exploring: share of all time; plain tokens at first
CHANGED = 0.1  # relative change of plain decoding that is worth timing again soon
USUAL = 256.0  # tokens of a completion, before any has ended
REMEMBERED = 6  # completions in the average length: requests of a kind follow each other


class AutoLength:
    """Drafts as many tokens as speed things up, decided token by token; none if drafting does not.

    Parameters
    ----------
    prior : CostCurve or LearnedPrior, optional
        Results of a probe or of earlier runs.
    widths : collection of int, optional
        The only numbers of positions that may be evaluated at once; 1 must be among them.
    longest : int
        Maximum draft tokens of a completion in one round.
    sources : collection of Source
        Where draft tokens come from.
    trees : bool
        Drafts may branch into trees.
    pads : bool
        Evaluations may be padded.

    Raises
    ------
    ValueError
        Width 1 is not allowed, or `longest` is not positive.
    """

    def __init__(
        self,
        prior: CostCurve | LearnedPrior | None = None,
        widths: Collection[int] | None = None,
        longest: int = 15,
        sources: Collection[Source] = frozenset({Source.MODEL}),
        *,
        trees: bool = False,
        pads: bool = True,
    ) -> None:
        if longest < 1:
            raise ValueError(f"the longest draft must be >= 1, got {longest}")
        if widths is not None and 1 not in widths:
            raise ValueError(f"width 1 must be allowed, got {sorted(widths)}")
        if not isinstance(prior, LearnedPrior):
            prior = LearnedPrior(prior, n_runs=0 if prior is None else SETTLED)
        self.n_runs, self._n_learnt = prior.n_runs, prior.n_learnt
        self.costs = Costs(prior.curve, widths, pads=pads, is_settled=self.is_settled)
        self.longest, self.sources = longest, frozenset(sources)
        self.drafting = min(self.sources - FREE, key=list(Source).index, default=Source.MODEL)
        self.acceptance = {source: Acceptance(is_copied=source in COPIES) for source in Source}
        self.acceptance[self.drafting] = Acceptance(prior.log_odds)
        self.acceptance[Source.NGRAM] = Acceptance(prior.copy_log_odds, is_copied=True)
        self.trees = TreeAcceptance(self.acceptance[self.drafting]) if trees else None
        self.drafts, self.plain = Exploration(prior.distance), Exploration()  # explored where the other pays
        self.credit = 0.0  # seconds that timing widths and exploring may cost
        self.sequences: list[AutoSequence] = []
        self.n_tokens = 0
        self.usual_length = USUAL  # tokens of a completion
        self._latest = -1  # evaluation

    @property
    def is_settled(self) -> bool:
        """Whether costs were measured often enough to be trusted."""
        return self.n_runs >= SETTLED

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> AutoSequence:
        """Start a completion."""
        sequence = AutoSequence(self, drops=drops, max_tokens=max_tokens)
        self.sequences.append(sequence)
        return sequence

    def end_sequence(self, sequence: AutoSequence) -> None:
        """End a completion, and learn how long completions are from those that were free to be."""
        if sequence not in self.sequences:
            return
        self.sequences.remove(sequence)
        was_free = sequence.max_tokens is None or sequence.max_tokens >= self.usual_length
        if sequence.n_written and was_free:
            self.usual_length += (sequence.n_written - self.usual_length) / REMEMBERED

    def plain_seconds(self, n_sequences: int) -> float | None:
        """Estimated seconds of a round of so many completions without drafts; None before one was timed."""
        if not self.costs.n_timed:
            return None
        return float(self.costs.padded_seconds(n_sequences, n_sequences)[0])

    def experience(self) -> LearnedPrior:
        """What the next run should start from."""
        log_odds, copies = (
            tuple(self.acceptance[source].log_odds.tolist()) for source in (self.drafting, Source.NGRAM)
        )
        n_runs = min(self.n_runs + 1, SETTLED)
        n_learnt = min(self._n_learnt, MOST) + self.acceptance[self.drafting].n_learnt
        return LearnedPrior(self.costs.learned(), log_odds, self.drafts.distance, copies, n_runs, n_learnt)

    def running(self) -> list[AutoSequence]:
        """The completions that are expected in the next evaluation."""
        return [each for each in self.sequences if each.takes_part(max(self._latest - 1, 0))]

    def learn(self, round_: Round, plan: RoundPlan, *, paid: bool, n_unread: int) -> None:
        """Learn from a round of a completion; what several share is learnt once.

        `paid`: its draft was accepted, at least in part. `n_unread`: tokens that the draft read besides.
        """
        n_made, n_steps = round_.n_accepted + 1, round_.n_priced_steps
        self.n_tokens += n_made
        if self.trees is not None and round_.draft.parents is not None:
            self.trees.learn(round_)
        if n_steps and round_.draft.is_chain:
            self.costs.observe_draft(n_steps, n_unread, round_.draft_seconds)
        seconds = round_.seconds / round_.n_sequences
        self.credit += SHARE * seconds
        if round_.evaluation != self._latest or round_.n_sequences == 1:
            self._learn_costs(round_)
        if plan.times_plain:
            self.plain.n_since = 0
        if plan.explored is self.drafting or plan.timed_width is not None:
            self.credit -= max(seconds - n_made * plan.plain, 0.0)
        if n_steps and plan.explored is self.drafting:
            self.drafts.learn(paid=paid)

    def _learn_costs(self, round_: Round) -> None:
        """Learn what an evaluation cost."""
        self._latest = round_.evaluation
        self.drafts.n_since += 1
        self.plain.n_since += 1
        if round_.verified_in.n_prefill:  # what it would have taken without the prompt is not known
            return
        before = self.costs.seconds(round_.width)
        self.costs.observe_verify(round_.width, round_.verify_seconds)
        if sum(self.costs.n_timed.values()) == TIMED:
            self.credit = CREDIT * self.costs.seconds(1)
        if round_.width == round_.n_sequences:
            self.plain.learn(paid=abs(self.costs.seconds(round_.width) / before - 1.0) > CHANGED)
        elif self.costs.is_surprised:  # does plain decoding take longer, too?
            self.plain.n_since = FARTHEST
