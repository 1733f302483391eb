"""Feed the cost model the timings of a known machine; see what it believes."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, sqrt

import numpy as np
import numpy.typing as npt
import pytest

from llamaspec.length import cost_model
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.cost_model import CATCH_UP, CostModel
from llamaspec.length.prior import LearnedPrior

Q4_0 = {1: 16.4, 2: 26.4, 3: 36.5, 4: 29.2, 5: 42.3, 6: 52.5, 7: 53.2, 8: 54.0}  # ms; width 4 is a dip


def probed(seconds: dict[int, float], step: float = 0.6) -> LearnedPrior:
    curve = CostCurve(tuple(seconds), tuple(t / 1000 for t in seconds.values()), step / 1000)
    return LearnedPrior.of_probe(curve)


PLACES = [*range(1, 18), *(17 * 1.15**i for i in range(1, 30))]  # widths that are known by themselves
N = len(PLACES)


class Weights:
    """The same beliefs in the space of weights: numbers that know nothing of each other at first.

    A scale, a slope, a step of the wandering from each place to the next, something of its own for each
    place and for a draft step; one row of `rows` says how they make up a logarithm of seconds.
    """

    def __init__(self, prior: LearnedPrior, allowed: set[int] | None = None) -> None:
        logs = np.log(PLACES)
        self.rows = np.zeros((N + 1, 2 + N + N + 1))
        self.rows[:, 0] = 1.0
        self.rows[:N, 1] = logs
        self.rows[:N, 2 : 2 + N] = np.tril(np.ones((N, N)))
        self.rows[:, 2 + N :] = np.eye(N + 1)
        self.allowed, self.n_timed = allowed, dict[int, int]()
        self.n_steps_timed = self.n_far = 0
        self.believe(prior)
        self.prior_plain = prior.means[0]

    def believe(self, prior: LearnedPrior) -> None:
        gaps = np.diff(np.log(PLACES), prepend=0.0)
        own = [0.0] + [0.12**2] * (N - 1) + [prior.variances[1]]
        self.mean = np.zeros(2 + N + N + 1)
        self.mean[[0, 1, -1]] = prior.means[0], 0.45, prior.means[1]
        self.covariance = np.diag([prior.variances[0], 0.25**2, *(0.1**2 * gaps), *own])
        for width, ratio, variance in zip(prior.widths, prior.means[2:], prior.variances[2:], strict=True):
            place = self.place(width)
            w = self.rows[place] - self.rows[0]
            self.correct(w, ratio - w @ self.mean, 1e-9)
            self.covariance[2 + N + place, 2 + N + place] += variance
        self.known, self.has_prior = {self.place(width) for width in prior.widths}, bool(prior.widths)

    @staticmethod
    def place(width: int) -> int:
        return int(np.abs(np.log(PLACES) - log(width)).argmin())

    def seconds(self, width: int) -> float:
        return exp(np.interp(log(width), np.log(PLACES), self.rows[:N] @ self.mean))

    def apart(self, place: int, first: int) -> float:
        w = self.rows[place] - self.rows[first]
        return float(w @ self.covariance @ w)

    def cheapest_width(self, n: int, widest: int = 17) -> int | None:
        best = None
        for width in range(widest, n - 1, -1):
            if self.allowed is None or width in self.allowed:
                least = 0.96 if width > 1 else 0.0
                if best is None or self.seconds(best) > least * self.seconds(width):
                    best = width
        return best

    def batch_seconds(self, positions: Sequence[int], z: float) -> list[float]:
        first, found = self.cheapest_width(positions[0]), []
        for n in positions:
            width = self.cheapest_width(n)
            if width is None or first is None:
                found.append(inf)
                continue
            variance = self.apart(self.place(width), self.place(first))
            found.append(self.seconds(width) * exp(z * sqrt(max(variance, 0.0))))
        return found

    def step(self, z: float = 0.0) -> float:
        return exp(self.rows[N] @ self.mean + z * sqrt(self.apart(N, 0)))

    def wide_step(self, n: float) -> float:
        """A step of the draft that reads n tokens, between whole numbers on a line."""
        if n <= 1:
            return n * self.step()
        whole = [
            max(self.seconds(i) for i in range(1, m + 1)) / self.seconds(1) for m in (int(n), int(n) + 1)
        ]
        return (whole[0] + (n - int(n)) * (whole[1] - whole[0])) * self.step()

    def observe_verify(self, width: int, seconds: float) -> None:
        place, n_before = self.place(width), self.n_timed.get(width, 0)
        self.covariance[0, 0] += 0.004**2
        self.covariance[2 + N :, 2 + N :] += 0.001**2 * np.eye(N + 1)
        self.learn(place, 0, n_before, log(seconds / self.seconds(width)), 0.07**2)
        self.known.add(place)
        self.n_timed[width] = n_before + 1
        if sum(self.n_timed.values()) == 2 and self.looks_foreign():
            plain = float(self.rows[0] @ self.mean), float(self.rows[0] @ self.covariance @ self.rows[0])
            self.believe(LearnedPrior(means=(plain[0], log(0.12)), variances=(plain[1], 1.0)))

    def looks_foreign(self) -> bool:
        return self.has_prior and bool(abs(self.rows[0] @ self.mean - self.prior_plain) > 0.4)

    def observe_draft(self, n_steps: float, n_unread: int, seconds: float) -> None:
        surprise = log(seconds / ((n_steps + 0.2 * n_unread) * self.step()))
        self.learn(N, -1, self.n_steps_timed, surprise, (0.07 * (1 + 0.2 * n_unread / n_steps)) ** 2)
        self.n_steps_timed += 1

    def learn(self, place: int, part: int, n_before: int, surprise: float, noise: float) -> None:
        w = self.rows[place]
        variance = w @ self.covariance @ w + noise
        doubt = float(surprise**2 / (variance * 2.5**2))
        sign = (doubt > 1) * (1 if surprise > 0 else -1)
        self.n_far = sign * (1 + abs(self.n_far) * (self.n_far * sign > 0))
        if doubt > 1:
            if abs(self.n_far) >= 3 or (surprise < 0 and n_before < 3):
                wrong = np.zeros(len(w))
                wrong[part] = 1.0
                if part == 0 and (n_before < 3 or abs(self.n_far) < 3):  # no width that was timed is moved
                    enough = 1 if n_before else 3  # but a first timing may show that another's was a hiccup
                    known = [width for width, n in self.n_timed.items() if n >= enough]
                    wrong[[2 + N + self.place(width) for width in known]] = -1.0
                    wrong[2 + N + place] = 0.0
                self.covariance += surprise**2 * np.outer(wrong, wrong)
            else:
                noise = variance * doubt - (variance - noise)
        self.correct(w, surprise, noise)

    def correct(self, w: npt.NDArray[np.float64], surprise: float, noise: float) -> None:
        gain = self.covariance @ w / (w @ self.covariance @ w + noise)
        self.mean = self.mean + gain * surprise
        self.covariance = self.covariance - np.outer(gain, w @ self.covariance)


PRIORS = {
    "nothing": lambda: LearnedPrior(),
    "a probe": lambda: probed(Q4_0),
    "of another machine": lambda: probed({1: 160.0, 3: 170.0, 8: 171.0}, step=0.0),
    "an earlier run": lambda: LearnedPrior((2, 5), (-4.0, -2.5, 0.3, 0.8), (0.2, 0.1, 0.01, 0.05)),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("prior", list(PRIORS))
def test_beliefs_are_those_of_a_filter_in_the_space_of_weights(
    monkeypatch: pytest.MonkeyPatch, prior: str, seed: int
) -> None:
    monkeypatch.setattr(cost_model, "OFTEN", 1000)  # every timing is learnt
    rng = np.random.default_rng(seed)
    allowed = {1, 2, 4, 5, 8, 16} if seed else None
    found, plain = CostModel(PRIORS[prior](), allowed), Weights(PRIORS[prior](), allowed)
    hiccups = rng.choice([0.0, 1.2, -1.2], 90, p=[0.8, 0.1, 0.1])
    hiccups[60:64] = 0.9  # this lasts
    for i, hiccup in enumerate(hiccups.tolist()):
        width = int(rng.choice([1, 1, 2, 3, 4, 5, 7, 17, 18, 19, 33, 34, 120]))
        seconds = 0.016 * width**0.6 * exp(0.1 * rng.standard_normal() + hiccup)
        n_steps, n_unread = float(rng.choice([1.0, 2.5, 4.0])), int(rng.choice([0, 1, 9]))
        for model in (found, plain):
            if i % 3 == 2:
                model.observe_draft(n_steps, n_unread, seconds / 9)
            else:
                model.observe_verify(width, seconds)
        assert found.n_timed == plain.n_timed
        widths = (1, 2, 4, 6, 11, 17, 18, 40, 130)
        assert [found.seconds(n) for n in widths] == pytest.approx([plain.seconds(n) for n in widths])
        cheapest = [(n, found.cheapest_width(n)) for n in (1, 2, 4, 5, 30)]
        assert all(found.knows(n) == (w is None or plain.place(w) in plain.known) for n, w in cheapest)
        steps = found.draft_step_seconds(), found.draft_step_seconds(2.0), found.drafting_seconds(3.0, 5)
        assert steps == pytest.approx((plain.step(), plain.step(2.0), 4.0 * plain.step()))
        assert found.wide_step_seconds(5).tolist() == pytest.approx([plain.wide_step(n) for n in range(6)])
        wide = [plain.wide_step(scored / 3) * 3 / plain.wide_step(1.0) for scored in (7, 9, 10)]
        assert [found.narrow_steps(3, n) for n in (2, 3, 7, 9, 10)] == pytest.approx([3, 3, *wide])
        if allowed is not None:  # 6 and 16 positions: widths that were never timed
            dearer = found.batch_seconds([6, 16], 1.5), plain.batch_seconds([6, 16], 1.5)
            assert dearer[0] == pytest.approx(dearer[1])
    fresh, positions = CostModel(found.learned((0.1, 0.2, 0.3)), allowed), [2, 3, 5, 8, 16]
    again = Weights(found.learned((0.1, 0.2, 0.3)), allowed)
    for z in (-1.0, 0.0, 2.0):
        assert fresh.batch_seconds(positions, z) == pytest.approx(again.batch_seconds(positions, z))
    assert [fresh.cheapest_width(n) for n in range(1, 18)] == [again.cheapest_width(n) for n in range(1, 18)]


def test_what_a_run_keeps_is_what_it_believed_with_the_doubts_of_another_day() -> None:
    model = CostModel(LearnedPrior((4,), (-4.0, -2.0, 0.5), (45.0, 0.2, 0.01)))
    kept = model.learned((0.1, 0.2, 0.3))
    assert (kept.widths, kept.log_odds) == ((4,), (0.1, 0.2, 0.3))
    assert kept.means == pytest.approx((-4.0, -2.0, 0.5))
    assert kept.variances == pytest.approx((49.0, 0.3, 0.016))  # no larger than a prior may be
    of_probe = probed({1: 100.0, 4: 150.0}, step=10.0)
    assert of_probe.means == pytest.approx((log(0.1), log(0.1), log(1.5)))
    assert of_probe.variances == pytest.approx((9.0, 0.1, 0.006))
    of_free = probed({1: 100.0}, step=0.0)
    assert of_free.means[1] == log(0.12)
    assert of_free.variances == pytest.approx((9.0, 1.1))


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"widths": (2,)}, "belong together"),
        ({"variances": (1.0, 1.0, 1.0)}, "belong together"),
        ({"widths": (1,), "means": (0.0,) * 3, "variances": (1.0,) * 3}, "ascend from 2"),
        ({"widths": (3, 3), "means": (0.0,) * 4, "variances": (1.0,) * 4}, "ascend from 2"),
        ({"widths": (4, 3), "means": (0.0,) * 4, "variances": (1.0,) * 4}, "ascend from 2"),
        ({"widths": (1 << 20,), "means": (0.0,) * 3, "variances": (1.0,) * 3}, "ascend from 2"),
        ({"variances": (1.0, -0.1)}, "finite"),
        ({"means": (0.0, -50.0)}, "finite"),
        ({"variances": (50.0, 1.0)}, "finite"),
        ({"log_odds": (0.0, float("nan"), 0.0)}, "finite"),
    ],
)
def test_a_prior_that_cannot_be_is_refused(parts: dict[str, tuple[float, ...]], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LearnedPrior(**parts)  # type: ignore[arg-type]
    LearnedPrior((2, (1 << 20) - 1), (49.9,) * 4, (0.0,) * 4)


def test_times_that_cannot_be_teach_nothing() -> None:
    model = CostModel(probed(Q4_0))
    before = believed(model)
    model.observe_verify(1, 0.0)
    model.observe_draft(0, 3, 1.0)
    model.observe_draft(2, 3, 0.0)
    assert (believed(model), model.n_timed) == (before, {})
    assert model.draft_step_seconds() == pytest.approx(0.0006)


def test_what_a_round_costs_besides_the_models_is_learnt_without_its_hiccups() -> None:
    model = CostModel(LearnedPrior())
    told = [model.observe_overhead(seconds, drafted=False) for seconds in (0.0, 2.0, 3.0, 9.0)]
    assert told == pytest.approx([0.0, 2.0, 3.0, 3 * 2.1])
    assert model.overhead_seconds == pytest.approx(2.1 + 0.1 * (6.3 - 2.1))


def test_what_rounds_with_drafts_cost_besides_is_no_part_of_plain_decoding() -> None:
    model = CostModel(LearnedPrior())
    told = [
        model.observe_overhead(n, drafted=drafted) for n, drafted in ((2.0, False), (5.0, True), (7.0, True))
    ]
    assert told == pytest.approx([2.0, 5.0, 6.0])
    assert model.overhead_seconds == 2.0


def test_an_outlier_moves_beliefs_no_further_than_a_surprise_within_reason() -> None:
    """A width's first timing was thrice what it should be: hardly believed, though nothing else is known."""
    model = CostModel(probed({1: 20.0, 4: 24.0}))
    for _ in range(4):
        model.observe_verify(1, 0.020)
    assert not model.is_surprised
    before = model.seconds(8)
    model.observe_verify(8, 3 * before)
    assert model.is_surprised
    assert model.seconds(8) < 1.5 * before
    model.observe_verify(8, before)
    assert model.seconds(8) == pytest.approx(before, rel=0.15)


def test_outliers_of_both_signs_in_a_row_are_no_change() -> None:
    """The second corrects the first, and says nothing of a third: that width 1 had become slower, too."""
    model = CostModel(LearnedPrior())
    for width, milliseconds in ((4, 27.1), (1, 43.0), (1, 12.9), (3, 26.8)):
        model.observe_verify(width, milliseconds / 1e3)
    assert believed(model)[0] == pytest.approx(13.0, rel=0.1)


def believed(model: CostModel) -> list[float]:
    return [1000 * model.seconds(width) for width in range(1, 10)]


def test_a_prior_is_believed_until_something_is_measured() -> None:
    model = CostModel(probed(Q4_0))
    assert believed(model)[:8] == pytest.approx(list(Q4_0.values()))
    assert model.draft_step_seconds() == pytest.approx(0.0006)
    assert [model.cheapest_width(n) for n in range(1, 9)] == [1, 2, 4, 4, 5, 6, 7, 8]


def test_one_timing_corrects_the_scale_of_every_width() -> None:
    model = CostModel(probed(Q4_0))
    model.observe_verify(1, 0.0197)  # a busy day: a fifth slower
    assert believed(model)[:8] == pytest.approx([1.2 * t for t in Q4_0.values()], rel=0.02)


def test_a_hiccup_of_width_1_is_forgotten_with_the_next_timing() -> None:
    for model in (CostModel(probed(Q4_0)), CostModel(LearnedPrior())):
        model.observe_verify(1, 0.0492)
        model.observe_verify(1, 0.0164)
        assert model.seconds(1) == pytest.approx(0.0164, rel=0.1)


def test_a_hiccup_of_width_1_moves_no_width_that_was_timed() -> None:
    """Its correction once made width 4 a third of what it was, and every draft seemed to win."""
    model = CostModel(LearnedPrior())
    model.observe_verify(4, 0.0292)
    model.observe_verify(1, 0.0492)
    model.observe_verify(1, 0.0164)
    assert [model.seconds(1), model.seconds(4)] == pytest.approx([0.0164, 0.0292], rel=0.15)


def test_a_hiccup_of_the_first_width_is_shown_by_the_first_timing_of_another() -> None:
    """It once stood for ever: four rows were padded to five positions, and four were never timed again."""
    model = CostModel(LearnedPrior())
    model.observe_verify(4, 3 * 0.0292)
    assert model.cheapest_width(4) == 4
    model.observe_verify(5, 0.0423)
    assert believed(model)[3] < 45.0
    for _ in range(4):
        model.observe_verify(5, 0.0423)
    assert model.cheapest_width(4) == 4


@pytest.mark.parametrize("width", [1, 4])
def test_a_hiccup_of_a_width_is_shown_by_its_next_timing(width: int) -> None:
    model = CostModel(LearnedPrior())
    model.observe_verify(width, 3 * 0.0292)
    model.observe_verify(width, 0.0292)
    assert model.seconds(width) == pytest.approx(0.0292, rel=0.1)


def test_a_width_is_padded_once_it_was_timed_often_enough() -> None:
    """Or never."""
    model = CostModel(probed(Q4_0))
    assert model.cheapest_width(3) == 4
    padded = []
    for _ in range(4):
        model.observe_verify(3, 0.0365)
        padded.append(model.cheapest_width(3))
    assert padded == [3, 3, 4, 4]


def test_a_model_is_blank_until_something_is_known_or_forbidden() -> None:
    model = CostModel(LearnedPrior())
    assert model.is_blank
    model.observe_verify(4, 0.0292)
    assert not model.is_blank
    assert not CostModel(probed(Q4_0)).is_blank
    assert not CostModel(LearnedPrior(), allowed={1, 4}).is_blank


def test_a_wider_evaluation_that_is_shorter_shows_the_hiccup_too() -> None:
    model = CostModel(probed(Q4_0))
    model.observe_verify(1, 0.0492)
    model.observe_verify(2, 0.0264)
    assert believed(model)[:2] == pytest.approx([16.4, 26.4], rel=0.1)


def test_a_prior_of_another_shape_is_doubted_at_its_first_contradiction() -> None:
    model = CostModel(probed({1: 100.0, 8: 102.0}))
    model.observe_verify(1, 0.0164)
    assert model.looks_foreign(1)
    for _ in range(3):
        model.observe_verify(1, 0.0164)
        model.observe_verify(2, 0.0264)
    assert believed(model)[:2] == pytest.approx([16.4, 26.4], rel=0.06)
    assert believed(model)[3] > 30.0  # the prior said 16.5


def test_unmeasured_widths_lie_between_their_neighbours() -> None:
    model = CostModel(LearnedPrior())
    for _ in range(5):
        for width, seconds in {1: 0.010, 5: 0.018, 9: 0.024}.items():
            model.observe_verify(width, seconds)
    times = believed(model)
    assert times[0] < times[1] < times[2] < times[4]
    assert times[4] < times[5] < times[6] < times[8]


def test_dips_are_kept_and_batches_padded_to_them() -> None:
    model = CostModel(LearnedPrior())
    for _ in range(6):
        for width, seconds in Q4_0.items():
            model.observe_verify(width, seconds / 1000)
    assert believed(model)[:8] == pytest.approx(list(Q4_0.values()), rel=0.03)
    assert model.cheapest_width(3) == 4
    assert model.batch_seconds([3])[0] == pytest.approx(model.seconds(4))
    assert model.batch_seconds([3, 5]) == pytest.approx([model.seconds(4), model.seconds(5)])


def test_only_allowed_widths_are_chosen() -> None:
    model = CostModel(probed(Q4_0), allowed={1, 5, 8})
    assert [model.cheapest_width(n) for n in range(1, 10)] == [1, 5, 5, 5, 5, 8, 8, 8, None]
    assert model.batch_seconds([9])[0] == float("inf")
    assert CostModel(probed(Q4_0), allowed={1, 32}).cheapest_width(5) == 32


def test_widths_of_many_rows_are_interpolated_and_learnt() -> None:
    """Width 36 lies between those with a belief of their own, 32 and 40."""
    model = CostModel(LearnedPrior())
    model.observe_verify(1, 0.010)
    for _ in range(8):
        model.observe_verify(36, 0.070)
    assert model.seconds(36) == pytest.approx(0.070, rel=0.06)
    assert model.seconds(1) == pytest.approx(0.010, rel=0.06)
    assert model.seconds(16) < model.seconds(36) < model.seconds(48)
    assert model.batch_seconds([700])[0] > model.batch_seconds([512])[0]


def test_bounds_are_those_of_the_ratio_to_width_1() -> None:
    model = CostModel(LearnedPrior())
    for _ in range(5):
        model.observe_verify(1, 0.010)
    assert model.batch_seconds([1], 2.0) == pytest.approx([model.seconds(1)])
    low, high = model.batch_seconds([1, 4], -2.0)[1], model.batch_seconds([1, 4], 2.0)[1]
    assert low < 0.7 * model.seconds(4) < 1.4 * model.seconds(4) < high
    for _ in range(10):
        model.observe_verify(4, 0.020)
    assert model.batch_seconds([1, 4], 2.0)[1] == pytest.approx(0.020, rel=0.15)


def test_a_spike_is_not_believed_but_a_lasting_change_is() -> None:
    model = CostModel(LearnedPrior())
    for _ in range(30):
        model.observe_verify(1, 0.010)
    model.observe_verify(1, 0.030)
    assert model.seconds(1) == pytest.approx(0.010, rel=0.02)
    for _ in range(30):
        model.observe_verify(1, 0.020)
    assert model.seconds(1) == pytest.approx(0.020, rel=0.05)


def test_growth_with_the_context_reaches_widths_not_measured_meanwhile() -> None:
    model = CostModel(probed(Q4_0))
    for i in range(300):
        model.observe_verify(4, 0.0292 * (1 + i / 300))
    assert model.seconds(4) == pytest.approx(2 * 0.0292, rel=0.08)
    assert model.seconds(1) == pytest.approx(2 * 0.0164, rel=0.25)


def test_draft_steps_and_catching_up_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    model = CostModel(LearnedPrior())
    model.observe_verify(1, 0.020)
    assert not model.knows_step
    for _ in range(40):
        n, unread = int(rng.integers(1, 5)), int(rng.choice([0, 0, 1, 10]))
        seconds = 0.002 * (n + CATCH_UP * unread)
        model.observe_draft(n, unread, seconds * float(np.exp(0.05 * rng.standard_normal())))
    assert model.knows_step
    assert model.draft_step_seconds() == pytest.approx(0.002, rel=0.05)
    assert model.drafting_seconds(1, 10) == pytest.approx(0.002 + 0.004, rel=0.05)


def test_guesses_that_cost_nothing_leave_the_prior_of_the_target_alone() -> None:
    model = CostModel(probed(Q4_0, step=0.0))
    model.observe_verify(1, 0.0164)
    for _ in range(5):
        model.observe_draft(3, 0, 20e-6)
    assert believed(model)[:8] == pytest.approx(list(Q4_0.values()), rel=0.02)
    assert model.draft_step_seconds() < 1e-4


def test_wide_batches_know_few_widths() -> None:
    """Else each of hundreds of widths would be a row of the covariance, and a question take milliseconds."""
    model, rng = CostModel(LearnedPrior()), np.random.default_rng(0)
    for width in [1, *rng.integers(1, 400, 600).tolist()]:
        model.observe_verify(width, 0.010 * width**0.6)
    assert len(model.learned((0.0, 0.0, 0.0)).widths) < 50
    assert [model.seconds(w) for w in (16, 36, 300)] == pytest.approx(
        [0.010 * w**0.6 for w in (16, 36, 300)], rel=0.02
    )


def test_a_batch_wider_than_any_that_is_known_still_costs_more() -> None:
    costs = CostModel(LearnedPrior())
    costs.observe_verify(1, 0.010)
    before = costs.seconds(900)
    assert costs.seconds(9000) / before == pytest.approx(10**0.45)


def test_a_well_known_width_is_learnt_where_it_surprises() -> None:
    """What was foreseen is not learnt again; times that change are followed all the same."""
    model = CostModel(LearnedPrior())
    for _ in range(8):
        model.observe_verify(1, 0.010)
        model.observe_verify(4, 0.020)
    before = model.seconds(1), model.seconds(4)
    for seconds in (0.0101, 0.0099, 0.0106):  # less than 7 % off
        model.observe_verify(1, seconds)
        assert (model.seconds(1), model.seconds(4)) == before
    model.observe_verify(1, 0.0109)
    assert model.seconds(1) > before[0]
    assert model.n_timed[1] == 12
    for _ in range(30):
        model.observe_verify(1, 0.012)
    assert model.seconds(1) == pytest.approx(0.012, rel=0.08)


def test_times_drift_while_nothing_surprises() -> None:
    """After a hundred evaluations as foreseen, a surprise is believed more than after one."""
    moved = []
    for n in (1, 100):
        model = CostModel(LearnedPrior())
        for _ in range(8 + n):
            model.observe_verify(1, 0.010)
        before = model.seconds(1)
        model.observe_verify(1, 0.0109)
        moved.append(model.seconds(1) / before)
    assert moved[1] > moved[0] > 1
