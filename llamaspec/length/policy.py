"""Drafts as many tokens as speed generation up: what all completions of a pair share and learn.

Each completion plans its own rounds from this (`AutoSequence`). If drafts could win but lose at the moment,
they are explored now and then. Knows no model and no clock: the same rounds give the same decisions.
tests/simulator.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from llamaspec.length.acceptance import KEPT, Acceptance
from llamaspec.length.costs import PROBED, TIMED, CostCurve, Costs
from llamaspec.length.sequence import FREE, AutoSequence, RoundPlan
from llamaspec.values import COPIES, Round, Source

SHARE, CREDIT = 0.015, 2.0  # budget for timing and exploring: share of all time; plain tokens at first
CHANGED = 0.1  # relative change of plain decoding after which it is timed again soon
RECENT = 20_000.0  # tokens of earlier runs in the gain of real requests
USUAL = 256.0  # tokens of a completion, before any has ended
REMEMBERED = 6  # completions in the average length: requests of a kind follow each other
NEAREST, FARTHEST = 4, 512  # minimum and maximum rounds between two explorations


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


@dataclass(frozen=True, slots=True)
class Gain:
    """What drafts have changed in real requests: seconds of generation, and an estimate of those without."""

    n_tokens: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= each < 1e15 for each in (self.n_tokens, self.seconds, self.plain_seconds)):
            raise ValueError("the tokens and seconds of requests must be >= 0")

    @property
    def speed_up(self) -> float:
        """Speed-up over plain decoding."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0

    def plus(self, other: Gain, factor: float = 1.0) -> Gain:
        """Return the sum, with `factor` times the other."""
        return Gain(
            max(self.n_tokens + factor * other.n_tokens, 0.0),
            max(self.seconds + factor * other.seconds, 0.0),
            max(self.plain_seconds + factor * other.plain_seconds, 0.0),
        )

    def faded(self) -> Gain:
        """Return this with the weight of at most `RECENT` tokens, because requests change."""
        return Gain().plus(self, min(1.0, RECENT / max(self.n_tokens, 1.0)))


@dataclass(frozen=True, slots=True)
class LearnedPrior:
    """The knowledge that a policy starts with, from a probe or from earlier runs.

    Raises
    ------
    ValueError
        A number is not finite, or a tuple does not have the length of `Acceptance.log_odds`.
    """

    curve: CostCurve | None = None
    log_odds: tuple[float, ...] = ()  # acceptance of the draft
    distance: int = NEAREST  # rounds between two explorations
    copy_log_odds: tuple[float, ...] = ()  # acceptance of copies of earlier text
    counts: tuple[int, ...] = ()  # tokens from which each of `log_odds` was learnt, at most `KEPT`
    copy_counts: tuple[int, ...] = ()  # the same for `copy_log_odds`
    earlier_log_odds: tuple[float, ...] = ()  # acceptance of copies of earlier answers
    earlier_counts: tuple[int, ...] = ()  # the same for `earlier_log_odds`
    gain: Gain = Gain()  # since the latest benchmark  # immutable

    def __post_init__(self) -> None:
        kinds = (
            (self.log_odds, self.counts, Acceptance()),
            (self.copy_log_odds, self.copy_counts, Acceptance(is_copied=True)),
            (self.earlier_log_odds, self.earlier_counts, Acceptance(is_copied=True)),
        )
        is_whole = all(
            len(log_odds) in (0, len(usual.log_odds)) and len(counts) in (0, len(log_odds))
            for log_odds, counts, usual in kinds
        )
        if not is_whole or self.distance < 1:
            raise ValueError("a prior of another kind")
        if not all(0 <= n <= KEPT for _, counts, _ in kinds for n in counts):
            raise ValueError(f"counts must be from 0 to {KEPT}")
        if not all(abs(number) < 50 for log_odds, _, _ in kinds for number in log_odds):
            raise ValueError("a prior must be finite")

    @property
    def n_learnt(self) -> int:
        """Draft tokens from which acceptance was learnt; counting stops at `KEPT`."""
        return self.counts[-1] if self.counts else 0

    def merged(self, start: LearnedPrior, kept: LearnedPrior) -> LearnedPrior:
        """Return this, with what other runs have kept meanwhile where this run has learnt nothing new.

        `start` is what this run started from, or what it has kept last.
        """
        drafts, copies, earlier = (
            _newest(*bins) for bins in zip(_bins(self), _bins(start), _bins(kept), strict=True)
        )
        return replace(
            self,
            curve=_merged_curve(self.curve, kept.curve),
            log_odds=drafts[0],
            counts=drafts[1],
            copy_log_odds=copies[0],
            copy_counts=copies[1],
            earlier_log_odds=earlier[0],
            earlier_counts=earlier[1],
            gain=kept.gain.plus(self.gain.plus(start.gain, -1.0)),
            distance=kept.distance if self.distance == start.distance else self.distance,
        )


_Bin = tuple[float, int]  # log-odds, and the tokens that they were learnt from


def _bins(prior: LearnedPrior) -> list[list[_Bin]]:
    """Return the bins of drafts, of copies, and of copies of earlier answers."""
    kinds = (
        (prior.log_odds, prior.counts),
        (prior.copy_log_odds, prior.copy_counts),
        (prior.earlier_log_odds, prior.earlier_counts),
    )
    return [[*zip(log_odds, counts or (0,) * len(log_odds), strict=True)] for log_odds, counts in kinds]


def _newest(
    mine: list[_Bin], start: list[_Bin], kept: list[_Bin]
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return log-odds and counts: a bin of `kept` wherever `mine` is still as at the `start`."""
    if len(mine) == len(start) == len(kept):
        mine = [other if own == old else own for own, old, other in zip(mine, start, kept, strict=True)]
    return tuple(log_odds for log_odds, _ in mine), tuple(n for _, n in mine)


def _merged_curve(mine: CostCurve | None, kept: CostCurve | None) -> CostCurve | None:
    """Return a curve with what is more certain in `kept`, as slow or fast as the machine is in `mine`."""
    if mine is None or kept is None:
        return mine or kept
    scale = mine.verify_seconds[0] / kept.verify_seconds[0]
    others = {width: (spread, scale * time) for width, (spread, time) in _by_width(kept).items()}
    found = _by_width(mine)
    for width, other in others.items():
        found[width] = min(found.get(width, other), other)
    widths = sorted(found)
    knows_less = not mine.draft_step_seconds or mine.draft_deviation > kept.draft_deviation
    drafting = kept if kept.draft_step_seconds and knows_less else mine
    factor = scale if drafting is kept else 1.0
    return replace(
        mine,
        widths=tuple(widths),
        verify_seconds=tuple(found[width][1] for width in widths),
        deviations=tuple(found[width][0] for width in widths),
        draft_step_seconds=factor * drafting.draft_step_seconds,
        draft_deviation=drafting.draft_deviation,
        draft_attention=drafting.draft_attention,
        draft_reading_seconds=mine.draft_reading_seconds or scale * kept.draft_reading_seconds,
    )


def _by_width(curve: CostCurve) -> dict[int, tuple[float, float]]:
    """Return the deviation and the seconds of each width."""
    deviations = curve.deviations or (PROBED,) * len(curve.widths)
    return dict(zip(curve.widths, zip(deviations, curve.verify_seconds, strict=True), strict=True))


class AutoLength:
    """Drafts as many tokens as speed generation up, decided token by token; none if drafting is slower.

    Parameters
    ----------
    prior : CostCurve or LearnedPrior, optional
        Results of a probe or of earlier runs.
    longest : int
        Maximum draft tokens of a completion in one round.
    sources : collection of Source
        Where draft tokens come from.
    pads : bool
        Plain rounds may be padded to time a width.

    Raises
    ------
    ValueError
        `longest` is not positive.
    """

    def __init__(
        self,
        prior: CostCurve | LearnedPrior | None = None,
        longest: int = 15,
        sources: Collection[Source] = frozenset({Source.MODEL}),
        *,
        pads: bool = True,
    ) -> None:
        if longest < 1:
            raise ValueError(f"the longest draft must be >= 1, got {longest}")
        if not isinstance(prior, LearnedPrior):
            prior = LearnedPrior(prior)
        self.costs = Costs(prior.curve, pads=pads)
        self.longest, self.sources = longest, frozenset(sources)
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
        self.sequences: list[AutoSequence] = []
        self.is_winning = False  # drafts were faster in the latest decision
        self.usual_length = USUAL  # tokens of a completion
        self.on_work: Callable[[float], object] = _ignore  # receives the seconds of each round
        self._latest = -1  # serial number of the latest evaluation

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> AutoSequence:
        """Start a completion."""
        sequence = AutoSequence(self, drops=drops, max_tokens=max_tokens)
        self.sequences.append(sequence)
        return sequence

    def end_sequence(self, sequence: AutoSequence) -> None:
        """End a completion; learn the usual length, unless the limit was shorter."""
        if sequence not in self.sequences:
            return
        self.sequences.remove(sequence)
        was_free = sequence.max_tokens is None or sequence.max_tokens >= self.usual_length
        if sequence.n_written and was_free:
            self.usual_length += (sequence.n_written - self.usual_length) / REMEMBERED

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

    def learn(self, round_: Round, plan: RoundPlan, *, paid: bool, n_unread: int, depth: float) -> None:
        """Learn from a round of a completion; an evaluation that several share is learnt once.

        `paid`: a draft token was accepted. `n_unread`: tokens that the draft model also had to process.
        `depth`: cached tokens that a position attended to.
        """
        n_made, n_steps = round_.n_accepted + 1, round_.n_priced_steps
        if n_steps:
            self.costs.observe_draft(n_steps, n_unread, round_.draft_seconds, depth)
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
        if self.costs.knows_plain and not round_.verified_in.n_prefill:
            self._n_tokens += n_made
            self._seconds += (
                seconds - round_.overhead_seconds / round_.n_sequences
            )  # plain rounds have it, too
            self._plain_seconds += n_made * plan.plain
        self.on_work(seconds)

    def _learn_costs(self, round_: Round) -> None:
        self._latest = round_.evaluation
        self.drafts.n_since += 1
        self.plain.n_since += 1
        if round_.verified_in.n_prefill:  # the seconds without the prompt chunk are unknown
            return
        seen = round_.verified_in
        before = self.costs.seconds(seen.width, seen.attention)
        self.costs.observe_verify(
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


def _ignore(_seconds: float) -> None: ...
