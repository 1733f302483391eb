"""The automatic length on simulated machines and texts: never slower, and nearly as fast as possible.

Nothing here is statistical: texts and noise come from seeds, so every figure is exact. The thresholds leave
some room. Ratios are times: 1.03 is three percent slower than plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, log

import numpy as np
import pytest

from llamaspec.length.automatic import AutoLength, AutoSequence
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.fixed import FixedLength
from llamaspec.length.prior import LearnedPrior
from llamaspec.values import Draft, Evaluation, Round, Source
from simulator import Array, Machine, Passage, optimal_rate, passage, play, play_together, table

N = 512
CURVES = {  # milliseconds by width, measured or reported: see docs/hardware.md
    "flat": {1: 10.0, 2: 10.3, 4: 10.7, 8: 12.0, 12: 13.5, 16: 15.0},  # bound by memory, like a GPU
    "slope": {1: 42.5, 2: 58.0, 3: 62.5, 4: 69.2, 5: 75.5, 6: 78.0, 8: 94.3, 12: 117.0, 16: 137.0},
    "stepped": {1: 34.9, 2: 37.1, 3: 45.0, 4: 29.9, 5: 41.6, 6: 48.5, 8: 53.0, 9: 61.9, 12: 76.0, 16: 79.5},
    "q4_0": {1: 16.4, 2: 26.4, 3: 36.5, 4: 29.2, 5: 42.3, 6: 52.5, 8: 54.0, 12: 79.0, 16: 89.0},
    "steep": {1: 20.0, 2: 36.0, 4: 77.0, 8: 149.0, 16: 290.0},  # drafting does not pay
}


def machine(curve: str, draft_ms: float = 1.0, **more: float) -> Machine:
    seconds = {width: ms / 1000 for width, ms in CURVES[curve].items()}
    return Machine(table(seconds), draft_ms / 1000, **{"jitter": 0.07, "spikes": 0.01} | more)


def text(chances: float | Array, seed: int = 0, *, shows: bool = True) -> Passage:
    """A text whose draft tokens are accepted with these chances; its confidences show them, or are noise."""
    rng = np.random.default_rng(1000 + seed)
    every = np.broadcast_to(np.asarray(chances, dtype=float), (N,)) if np.ndim(chances) == 0 else chances
    every = np.asarray(every, dtype=float)
    noise = rng.uniform(0.05, 0.95, len(every))
    shown = np.clip(every + 0.05 * rng.standard_normal(len(every)), 0.02, 0.99) if shows else noise
    return passage(every, shown, seed)


def mixed(seed: int = 0) -> Passage:
    """Easy and hard tokens."""
    return text(np.random.default_rng(seed).choice((0.15, 0.6, 0.95), p=(0.3, 0.3, 0.4), size=N), seed)


def stretches(seed: int = 0) -> Passage:
    """64 hard tokens, 64 easy ones, and so on."""
    return text(np.where((np.arange(N) // 64) % 2 == 0, 0.2, 0.93), seed)


TEXTS: dict[str, Callable[[int], Passage]] = {
    "0.5": lambda seed: text(0.5, seed, shows=False),
    "0.7": lambda seed: text(0.7, seed, shows=False),
    "0.9": lambda seed: text(0.9, seed, shows=False),
    "mixed": mixed,
    "stretches": stretches,
}


def mean(ratios: list[float]) -> float:
    return exp(sum(map(log, ratios)) / len(ratios))


@pytest.mark.parametrize(
    ("curve", "draft_ms", "chance"),
    [
        ("steep", 3.0, 0.7),
        ("steep", 12.0, 0.9),
        ("q4_0", 12.0, 0.5),
        ("q4_0", 3.0, 0.05),
        ("slope", 3.0, 0.0),
    ],
)
@pytest.mark.parametrize("prior", [False, True])
def test_never_slower_if_drafting_loses(curve: str, draft_ms: float, chance: float, prior: bool) -> None:
    on = machine(curve, draft_ms)
    ran = [
        play(AutoLength(on.curve() if prior else None), on, text(chance, seed), seed).to_plain
        for seed in range(3)
    ]
    assert mean(ran) <= (1.03 if prior else 1.04)  # once, widths are timed
    assert max(ran) <= 1.06


@pytest.mark.parametrize("prior", [False, True])
@pytest.mark.parametrize("curve", ["flat", "slope", "stepped"])
def test_nearly_as_fast_as_the_best_fixed_length(curve: str, prior: bool) -> None:
    """Compared with the best length for each text, and with the best one for all texts."""
    on = machine(curve)
    autos: list[float] = []
    fixeds: list[list[float]] = []
    for name, make in TEXTS.items():
        for seed in range(1):
            each, policy = make(seed), AutoLength(on.curve() if prior else None)
            autos.append(play(policy, on, each, seed).to_plain)
            fixeds.append([play(FixedLength(n), on, each).to_plain for n in (0, 1, 2, 3, 4, 6, 8)])
            assert autos[-1] <= 1.03, name
    assert mean([auto / min(fixed) for auto, fixed in zip(autos, fixeds, strict=True)]) <= 1.07
    for of_one_length in zip(*fixeds, strict=True):
        assert mean(autos) <= (1.04 if prior else 1.06) * mean(list(of_one_length))


@pytest.mark.parametrize("curve", ["flat", "slope"])
def test_nearly_as_fast_as_the_optimal_policy(curve: str) -> None:
    """After 128 tokens. The optimum, by dynamic programming, knows costs and chances beforehand."""
    on, ratios = machine(curve), list[float]()
    for chance in (0.6, 0.8, 0.95):
        took = sum(play(AutoLength(), on, text(chance, s), s).seconds_from(128) for s in range(4))
        ratios.append(took * optimal_rate(on, [chance], [1.0]) / (4 * (N - 128)))
    assert mean(ratios) <= 1.10
    assert max(ratios) <= 1.15


def test_the_optimum_for_a_constant_chance_is_the_best_fixed_length() -> None:
    on = machine("slope")
    rates = [
        sum(0.8**i for i in range(n + 1))
        / (n * on.draft_seconds + float(on.verify_seconds[n]) + on.rest_seconds)
        for n in range(17)
    ]
    assert optimal_rate(on, [0.8], [1.0]) == pytest.approx(max(rates), rel=1e-3)


class HeldUp(AutoLength):
    """Some evaluations take three times as long, because the host stalls, or much longer."""

    def __init__(self, first: int, last: int, factor: float = 3.0) -> None:
        super().__init__()
        self.stall, self.factor = range(first, last), factor
        self.stalled = 0.0  # seconds that were taken for a stall

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> AutoSequence:
        sequence = super().start_sequence(drops=drops)
        observe = sequence.observe

        def slow(round_: Round) -> Round:
            factor = self.factor if round_.evaluation in self.stall else 1.0
            verify, drafting = factor * round_.verify_seconds, factor * round_.draft_seconds
            plain = sequence.reading.plain_seconds(round_.verified_in)
            round_ = replace(round_, verify_seconds=verify, draft_seconds=drafting, plain_seconds=plain)
            self.stalled += (round_ := observe(round_)).stalled_seconds
            return round_

        sequence.observe = slow  # type: ignore[method-assign]
        return sequence


@pytest.mark.parametrize(("first", "last"), [(1, 2), (1, 12), (30, 32), (30, 60)])
def test_a_stall_of_the_host_is_overcome(first: int, last: int) -> None:
    """Also a stall of the first evaluations, by which all others are judged."""
    useful = [
        play(HeldUp(first, last), machine("slope"), text(0.85, s), s).to_plain
        / play(AutoLength(), machine("slope"), text(0.85, s), s).to_plain
        for s in range(3)
    ]
    assert mean(useful) <= 1.15
    useless = [play(HeldUp(first, last), machine("steep", 3.0), text(0.6, s), s).to_plain for s in range(3)]
    assert mean(useless) <= 1.08


@pytest.mark.parametrize("at", [1, 2, 3, 40, 90])
def test_a_pause_of_the_machine_changes_neither_gain_nor_budget(at: int) -> None:
    """Ctrl-Z, or a laptop that slept: drafts seemed to be 83 % slower, and still 45 % after 10,000 tokens."""
    on, policy = machine("slope"), HeldUp(at, at + 1, factor=50_000.0)
    for seed in range(3):
        run = play(policy, on, text(0.85, seed), seed)
    gain, plain = policy.experience().gain, policy.shared.costs.seconds(1)
    assert gain.speed_up == pytest.approx(1 / run.to_plain, rel=0.15)
    assert policy.stalled > 49_000 * on.verify_seconds[0]
    assert 0 < policy.shared.credit < 40 * plain


def test_costs_that_drift_are_followed() -> None:
    """The context grows: at the end, a plain evaluation takes twice as long, and a wide one much longer."""
    on = machine("slope", attention=1 / 512)
    autos = [play(AutoLength(on.curve()), on, mixed(seed), seed).to_plain for seed in range(4)]
    best = [min(play(FixedLength(n), on, mixed(seed)).to_plain for n in range(7)) for seed in range(4)]
    assert mean(autos) <= 1.03 * mean(best)


def test_a_draft_that_turns_bad_is_left_and_one_that_turns_good_is_found() -> None:
    on, found = machine("slope"), list[float]()
    for seed in range(4):
        policy = AutoLength()
        play(policy, on, text(0.9, seed), seed)
        assert play(policy, on, text(0.05, seed), seed).to_plain <= 1.04
        fresh = AutoLength()
        play(fresh, on, text(0.05, seed, shows=False), seed)
        good = text(0.95, seed)
        found.append(play(fresh, on, good, seed).to_plain / play(FixedLength(4), on, good).to_plain)
    assert mean(found) <= 1.5


def test_exploring_gets_rare_while_it_loses() -> None:
    on, hopeless = machine("slope", 3.0), text(np.full(8192, 0.02), shows=False)
    ran = play(AutoLength(), on, hopeless)
    drafted = np.flatnonzero(ran.n_steps)
    assert ran.to_plain <= 1.02
    assert len(drafted) < 60
    assert np.diff(drafted).max() > 256
    assert drafted[-1] > 4096, "it never gives up"


def test_a_text_that_turns_into_a_copy_is_copied() -> None:
    """There is no other draft. All copies are wrong in the first half, and right in the second."""
    right = np.where(np.arange(N) < N // 2, 0.0, 1.0)
    matches = np.concatenate([np.full(N // 2, 0.7), np.minimum(0.7 + 0.02 * np.arange(N // 2), 0.98)])
    copies = Passage(right, right.astype(bool), matches)
    on = machine("slope")
    ran = play(AutoLength(sources={Source.NGRAM}), on, copies, copies=copies)
    half = next(i for i, n in enumerate(ran.n_tokens) if n > N // 2)
    assert ran.seconds[half] <= 1.03 * ran.plain_seconds[half]
    assert ran.seconds_from(N // 2 + 16) < 0.5 * float(on.verify_seconds[0]) * (N // 2 - 16)


def test_copies_that_cannot_win_are_not_verified() -> None:
    """That costs little, and shows whether they would have been accepted."""
    copies = text(0.5, shows=False)
    ran = play(
        AutoLength(sources={Source.NGRAM}), machine("steep", jitter=0.0, spikes=0.0), copies, copies=copies
    )
    assert sum(ran.lengths[32:]) < 20
    assert ran.to_plain <= 1.03


@pytest.mark.parametrize("wide", [1.0, 0.5])
def test_copies_that_are_never_right_are_not_verified_whatever_the_costs_say(wide: float) -> None:
    """Costs from a busy time said that a wide evaluation is free, or even cheaper than a plain one."""
    prior = CostCurve((1, 2, 4, 8, 16), (0.04, *[0.04 * wide] * 4), 0.01)
    policy, on, n_verified = AutoLength(prior, sources={Source.NGRAM}), machine("slope"), 0
    for seed in range(4):
        wrong = Passage(np.zeros(N), np.zeros(N, dtype=bool), np.full(N, 0.8))  # after matches of 4 tokens
        ran = play_together(policy, on, [wrong], seed, wrong, is_disturbed=True)
        n_verified += sum(ran.lengths)
        assert ran.to_plain <= (1.08 if seed == 0 else 1.02)
    assert n_verified < 80


@pytest.mark.parametrize("curve", ["flat", "slope", "steep"])
@pytest.mark.parametrize("n_sequences", [2, 5])
def test_several_sequences_share_every_evaluation(curve: str, n_sequences: int) -> None:
    """As they fill the batch, drafts get shorter."""
    on, compared = machine(curve), []
    for first in range(0, 3 * n_sequences, n_sequences):
        texts = [mixed(seed) for seed in range(first, first + n_sequences)]
        shared = play_together(AutoLength(), on, texts).to_plain
        fixed = [play_together(FixedLength(n), on, texts).to_plain for n in (0, 1, 2, 4)]
        assert shared <= 1.04
        compared.append(shared / min(fixed))
    assert np.mean(compared) <= 1.05


def test_sequences_that_come_and_go_leave_nothing() -> None:
    policy = AutoLength()
    play_together(policy, machine("flat"), [mixed(seed) for seed in range(7)], n_sequences=3)
    assert policy.shared.n_sequences == 0


def one_round(sequence: AutoSequence, on: Machine, confidence: float, evaluation: int) -> tuple[int, int]:
    """Run a round whose draft tokens have one confidence and are accepted.

    Returns how many tokens are drafted, and how many of them are verified.
    """
    made = Draft()
    while sequence.wants_more(made):
        made = Draft(np.zeros(len(made) + 1, np.int32), (), (confidence,) * (len(made) + 1))
    n = sequence.n_verified(made)
    seconds = float(on.verify_seconds[n])
    round_ = Round(made.first(n), n, 0, Evaluation(n + 1, 1, evaluation), verify_seconds=seconds)
    steps = {"n_draft_steps": len(made), "draft_seconds": len(made) * on.draft_seconds}
    sequence.observe(replace(round_, n_dropped=len(made) - n, **steps))  # type: ignore[arg-type]
    return len(made), n


@pytest.mark.parametrize("curve", ["flat", "steep"])
def test_if_the_rule_drops_nothing_a_draft_is_verified_whole_or_not_at_all(curve: str) -> None:
    on, sequence = machine(curve), AutoLength(machine(curve).curve()).start_sequence(drops=False)
    found = [one_round(sequence, on, 0.1 + 0.8 * (i % 2), i) for i in range(80)]
    assert all(n in (0, made) for made, n in found)
    assert any(made > 1 for made, _ in found) == (curve == "flat")


def test_an_unsure_draft_is_cut_before_verification() -> None:
    on = machine("slope", jitter=0.0, spikes=0.0)
    sequence = AutoLength(on.curve()).start_sequence(drops=True)
    sequence.observe(Round(Draft(), 0, 0, Evaluation(1, 1, 1000), verify_seconds=float(on.verify_seconds[0])))
    made = Draft(np.zeros(10, np.int32), (), (0.97, 0.97, *[0.02] * 8))
    assert sequence.wants_more(made.first(0))
    assert 2 <= sequence.n_verified(made) <= 4


def test_a_run_starts_with_what_the_last_one_learnt() -> None:
    on, policy = machine("slope"), AutoLength()
    play(policy, on, text(0.9))
    learnt = policy.experience()
    assert 0 < learnt.n_learnt == AutoLength(learnt).experience().n_learnt
    assert max(play(AutoLength(learnt), on, text(0.9, 1)).lengths[:4]) >= 3
    play(lost := AutoLength(), machine("steep", 12.0), text(0.3))
    again = play(AutoLength(lost.experience()), machine("steep", 12.0), text(0.3, 1))
    assert sum(again.n_steps) <= 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: AutoLength(longest=0), "longest draft must be >= 1, got 0"),
        (lambda: LearnedPrior(log_odds=(0.1, 0.2)), "of another kind"),
        (lambda: LearnedPrior(log_odds=(float("nan"),) * 10), "must be finite"),
    ],
)
def test_impossible_arguments_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def copying(sequence: AutoSequence, n_matched: int) -> int:
    """Return how many tokens are copied after a match of `n_matched` tokens."""
    ahead = tuple(i / (i + 1.0) for i in range(n_matched, n_matched + 511))
    n = 0
    while sequence.wants_more(Draft(np.zeros(n, np.int32), (), ahead[:n], Source.NGRAM, ahead=ahead[n:])):
        n += 1
    return n


def test_a_prediction_is_copied_by_a_policy_that_was_made_without_one() -> None:
    """Predictions come with requests. Once, this policy never copied from them."""
    curve = CostCurve((1, 2, 4, 8, 16), (1.0, 1.1, 1.2, 1.4, 1.8), 0.0)
    sequence = AutoLength(curve, sources={Source.MODEL}).start_sequence(drops=True)
    copied(sequence, 0, 0, 0, 1.0)
    assert sequence.wants_more(Draft(source=Source.PREDICTION, ahead=(0.99,) * 16))
    assert not sequence.wants_more(Draft(source=Source.NGRAM, ahead=(0.99,) * 16))


def copied(sequence: AutoSequence, n: int, n_accepted: int, evaluation: int, seconds: float) -> None:
    """Observe a round with a copy of `n` tokens."""
    draft = Draft(np.zeros(n, np.int32), (), (0.99,) * n, Source.NGRAM)
    sequence.observe(Round(draft, n_accepted, 0, Evaluation(n + 1, 1, evaluation), verify_seconds=seconds))


def test_copies_double_while_they_are_accepted() -> None:
    """A position costs 0.1 of a plain token, and all copies are right."""
    widths = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    curve = CostCurve(widths, tuple(1.0 + 0.1 * (width - 1) for width in widths), 0.0)
    sure = LearnedPrior(curve, copy_log_odds=(20.0,) * 12)
    sequence = AutoLength(sure, sources={Source.NGRAM}).start_sequence(drops=True)
    for i, n in enumerate((16, 32, 64, 128)):
        assert 0.5 * n < copying(sequence, 400) <= n
        copied(sequence, n, n, i, 1.0 + 0.1 * n)
    copied(sequence, 256, 0, 9, 26.6)
    assert 14 <= copying(sequence, 400) <= 16


def test_long_copies_that_were_rejected_do_not_end_copying() -> None:
    """A copy of 205 tokens costs 103 plain tokens; 21 of them are accepted."""
    widths = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    curve = CostCurve(widths, (1.0, 1.9, 3.6, 7.2, 11.4, 22.0, 36.0, 60.0, 130.0), 0.0)
    sequence = AutoLength(LearnedPrior(curve), sources={Source.NGRAM}).start_sequence(drops=True)
    for i in range(3):
        sequence.observe(Round(Draft(), 0, 0, Evaluation(1, 1, i), verify_seconds=1.0))
    for i, (n, n_accepted) in enumerate(((16, 16), (35, 35), (62, 62), (62, 62), (205, 21), (205, 21))):
        copied(sequence, n, n_accepted, 3 + i, float(np.interp(n + 1, widths, curve.verify_seconds)))
    assert copying(sequence, 100) >= 8


@pytest.mark.parametrize(("beyond", "expected"), [(0.1, 114), (0.01, 511)])
def test_a_copy_is_as_long_as_is_cheap_per_token(beyond: float, expected: int) -> None:
    """If each position costs the same, a longer copy gains little."""
    widths = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    seconds = tuple(1.0 + 0.1 * min(w - 1, 63) + beyond * max(w - 64, 0) for w in widths)
    sequence = AutoLength(CostCurve(widths, seconds, 0.0), sources={Source.NGRAM}).start_sequence(drops=True)
    for i, n in enumerate((16, 32, 64, 128, 256)):
        copied(sequence, n, n, i, float(np.interp(n + 1, widths, seconds)))
    assert copying(sequence, 400) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(("seconds", "expected"), [(0.0001, 256), (0.002, 250), (0.02, 64)])
def test_a_copy_does_not_keep_other_sequences_waiting(seconds: float, expected: int) -> None:
    """It takes at most half a second, or 64 positions. Alone, it is as long as is fastest."""
    widths = (1, 2, 4, 8, 16, 512)
    curve = CostCurve(widths, tuple(1.0 + (width - 1) * seconds for width in widths), 0.0)
    policy = AutoLength(LearnedPrior(curve, copy_log_odds=(20.0,) * 12), sources={Source.NGRAM})
    sequence, other = (policy.start_sequence(drops=True) for _ in range(2))
    for i, n in enumerate((16, 32, 64, 128)):
        copied(sequence, n, n, i, 1.0 + n * seconds)
    beside = copying(sequence, 511)
    assert 0.8 * expected <= beside <= expected
    other.close()
    copied(sequence, beside, beside, 9, 1.0 + beside * seconds)
    assert copying(sequence, 511) >= 1.5 * beside


def test_completions_that_a_limit_made_short_do_not_change_the_usual_length() -> None:
    """An editor's short completions put the drafts of chats to sleep."""
    policy = AutoLength()
    usual = policy.shared.usual_length
    for n, max_tokens in ((30, 30), (5, 30), (128, 128), (400, None), (2, 4000), (60, 160)):
        sequence = policy.start_sequence(drops=True, max_tokens=max_tokens)
        for i in range(n):
            sequence.observe(Round(Draft(), 0, 0, Evaluation(1, 1, i), verify_seconds=0.1))
        sequence.close()
        changed, usual = policy.shared.usual_length != usual, policy.shared.usual_length
        assert changed == (max_tokens not in (30, 128)), (n, max_tokens)


@pytest.mark.parametrize(("n_unread", "wakes"), [(1000, True), (3000, False)])
def test_a_draft_counts_on_half_of_the_usual_length(n_unread: int, wakes: bool) -> None:
    """It processed 750 tokens beside an answer of 42, which took twice as long as without a draft.

    Drafts save the time of about 200 plain tokens of 256. Processing 3,000 tokens takes the time of 150 plain
    tokens, processing 1,000 takes that of 50.
    """
    curve = CostCurve((1, 2, 4, 8, 16), (1.0, 1.1, 1.1, 1.1, 1.1), 0.05, 0.05)
    text = AutoLength(LearnedPrior(curve, log_odds=(3.0,) * 10)).start_sequence(drops=True, max_tokens=4000)
    text.reading.start_prompt(n_unread)
    nothing = Draft(source=Source.MODEL)
    for i in range(40):
        if text.wants_more(nothing):
            break
        text.observe(Round(nothing, 0, 0, Evaluation(1, 1, i), verify_seconds=1.0))
    assert (i < 20) == wakes


def test_a_long_prompt_is_processed_by_the_draft_after_some_tokens_if_that_saves_time() -> None:
    """Processing a prompt token costs 0.05 of a plain token; drafts save half of the time."""
    curve = CostCurve((1, 2, 4, 8, 16), (1.0, 1.1, 1.1, 1.1, 1.1), 0.05, 0.05)
    policy, nothing = AutoLength(LearnedPrior(curve, log_odds=(3.0,) * 10)), Draft(source=Source.MODEL)
    short = policy.start_sequence(drops=True, max_tokens=200)
    short.reading.start_prompt(100)
    assert not short.wants_more(nothing), "the first token comes first"
    short.observe(Round(nothing, 0, 0, Evaluation(1), verify_seconds=1.0))
    short.observe(Round(nothing, 0, 0, Evaluation(1), verify_seconds=1.0))
    assert short.wants_more(nothing)
    assert short.reading.n_to_read == 0, "all of it, then it drafts"
    assert short.reading.unused is None
    short.close()
    brief = policy.start_sequence(drops=True, max_tokens=3)
    brief.reading.start_prompt(100)
    assert brief.reading.unused is not None
    assert brief.reading.unused.reading_seconds == pytest.approx(5.0)
    assert brief.reading.unused.saved_seconds < 3.0
    long = policy.start_sequence(drops=True, max_tokens=500)
    brief.close()
    long.reading.start_prompt(400)
    for i in range(8):
        if long.wants_more(nothing):
            break
        long.observe(Round(nothing, 0, 0, Evaluation(1, 1, i), verify_seconds=1.0))
    assert i == 6  # the prompt takes as long as 20 plain tokens; it waits for a quarter of that
    assert long.reading.n_to_read == 64  # the minimum, although a plain round takes as long as 20
    assert not long.wants_more(Draft.certain([1]))
    copies = policy.start_sequence(drops=True, max_tokens=500)
    copies.reading.start_prompt(400)
    for i in range(8):  # 16 tokens a round: no draft is wanted
        assert not copies.wants_more(nothing)
        copied(copies, 15, 15, 20 + i, 1.3)


def test_prompt_chunks_show_the_cost_of_wide_evaluations() -> None:
    policy = AutoLength(sources={Source.NGRAM})
    sequence = policy.start_sequence(drops=True)
    sequence.reading.observe_prompt(Evaluation(512), 8.0)
    sequence.observe(Round(Draft(), 0, 0, Evaluation(1), verify_seconds=0.1))
    assert policy.shared.costs.widest_timed() == 512
    assert policy.shared.costs.seconds(512) == pytest.approx(8.0, rel=0.1)
    assert policy.shared.costs.seconds(64) == pytest.approx(0.1 + 63 / 511 * 7.9, rel=0.1)


def test_a_block_costs_one_step_however_many_of_its_tokens_are_verified() -> None:
    """A draft step takes nearly as long as a plain token, and more positions cost next to nothing."""
    curve = CostCurve((1, 2, 4, 8, 16), (1.0, 1.01, 1.02, 1.03, 1.05), 0.9)
    n_verified = {}
    for source in (Source.MODEL, Source.BLOCK):
        policy = AutoLength(LearnedPrior(curve, log_odds=(2.0,) * 10), sources={source})
        sequence, draft = policy.start_sequence(drops=True), Draft(source=source)
        sequence.n_written = 5
        while sequence.wants_more(draft):
            draft = draft.plus(1, None, 0.9)
        n_verified[source] = sequence.n_verified(draft)
    assert n_verified[Source.MODEL] == 0
    assert n_verified[Source.BLOCK] > 6
