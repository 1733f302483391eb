"""The verdict on costs and on a pair, from its kept measurements on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaspec import ModelOptions
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.estimates import Acceptance
from llamaspec.length.prior import Gain, LearnedPrior
from llamaspec.measure.store import forget, keep, keep_gains, key_of
from llamaspec.measure.verdict import (
    BestFixedLength,
    best_length,
    break_even,
    pair_verdict,
    round_seconds,
    saturation_width,
    verdict,
)
from llamaspec.plan import DraftPlan, ModelFile

CHEAP = CostCurve((1, 4, 9), (1.0, 1.3, 1.8), 0.1)
DEAR = CostCurve((1, 4, 9), (1.0, 4.0, 9.0), 0.1)
KNOWN = (*Acceptance().log_odds[:-1].tolist(), 1.1)  # 75 % of the draft's tokens
KNOWN_WELL = (32,) * 10
POOR = (*Acceptance().log_odds[:-1].tolist(), -5.0)


@pytest.fixture
def pair(target_file: Path, own_cache: None) -> DraftPlan:
    model = ModelFile(target_file, ModelOptions(threads=1))
    return DraftPlan(model, model)


@pytest.mark.parametrize(
    ("prior", "said"),
    [
        (
            LearnedPrior(CHEAP, KNOWN, counts=KNOWN_WELL),
            "about 1.7 times as fast as without drafts (computed",
        ),
        (LearnedPrior(CHEAP, POOR, counts=KNOWN_WELL), "at 1%, as in all runs so far, it is no faster"),
        (LearnedPrior(CHEAP, POOR, counts=(31,) * 10), None),  # the first draft tokens may be unlucky
        (
            LearnedPrior(DEAR, KNOWN),
            "slower at any acceptance, so plain decoding and copies are used (computed",
        ),
        (LearnedPrior(CHEAP), None),  # nothing was verified
        (LearnedPrior(CostCurve((1, 2, 512), (1.0, 2.0, 9.0), 0.1), KNOWN), None),  # too few widths
        (LearnedPrior(), None),
    ],
)
def test_costs_and_acceptance(pair: DraftPlan, prior: LearnedPrior, said: str | None) -> None:
    keep(pair, prior)
    found = pair_verdict(pair)
    assert found is None if said is None else found is not None and said in found


def test_a_benchmark_decides_and_groups_are_kept(pair: DraftPlan) -> None:
    keep(pair, LearnedPrior(DEAR, KNOWN))
    keep_gains(key_of(pair), {"chat": 1.58})
    keep_gains(key_of(pair), {"edits": 2.5, "code": 0.9, "lists": 1.01})
    assert pair_verdict(pair) == (
        "on this machine this pair is about 1.6 times as fast for chat, about 2.5 times as fast for edits, "
        "10% slower for code and as fast as without drafts for lists (measured by llamaspec bench at "
        "temperature 0)"
    )
    assert forget(pair)
    assert pair_verdict(pair) is None


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (Gain(5000, 100.0, 150.0), "was about 1.5 times as fast as without drafts in its latest requests"),
        (Gain(5000, 100.0, 80.0), "was 20% slower than without drafts in its latest requests"),
        (Gain(5000, 100.0, 101.0), "was as fast as without drafts in its latest requests"),
        (Gain(1999, 100.0, 150.0), "69% slower for edits"),  # too few tokens
        (Gain(50_000, 100.0, 149.0), "69% slower for edits"),  # of less than 3 ms
    ],
)
def test_real_requests_replace_a_benchmark(pair: DraftPlan, gain: Gain, said: str) -> None:
    """A benchmark on a busy machine said "0.31 times as fast for edits" for ever."""
    keep_gains(key_of(pair), {"edits": 0.31})
    keep(pair, LearnedPrior(CHEAP, KNOWN, gain=gain))
    found = pair_verdict(pair)
    assert found is not None
    assert said in found
    keep_gains(key_of(pair), {"edits": 1.4})
    assert "about 1.4 times as fast for edits" in str(pair_verdict(pair)), "the newest counts"


def test_another_quantization_is_named_if_it_was_measured_and_wins(
    target_file: Path, tmp_path: Path, own_cache: None
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    files = {name: folder / f"big-{name}.gguf" for name in ("Q4_K_M", "q8_0", "F16")}
    for name, path in files.items():
        path.write_bytes(target_file.read_bytes() + name.encode())  # each has an identity of its own
    draft = ModelFile(target_file, ModelOptions(threads=1))
    pairs = {name: DraftPlan(ModelFile(path, draft.options), draft) for name, path in files.items()}
    keep(pairs["Q4_K_M"], LearnedPrior(DEAR, KNOWN))
    alone = pair_verdict(pairs["Q4_K_M"])
    assert alone is not None
    keep(pairs["F16"], LearnedPrior(CostCurve((1, 4, 9), (3.0, 3.3, 3.8), 0.1)))  # still slower
    assert pair_verdict(pairs["Q4_K_M"]) == alone
    keep(pairs["q8_0"], LearnedPrior(CostCurve((1, 4, 9), (1.2, 1.5, 2.0), 0.1)))
    assert pair_verdict(pairs["Q4_K_M"]) == (
        f"{alone}; big-q8_0.gguf with drafts is 1.7 times as fast at 80% acceptance"
    )


# Curves

DIP = CostCurve((1, 2, 3, 4), (1.0, 2.0, 3.0, 1.5), 0.1)  # width 4 is cheaper than 2 and 3


def test_rounds_interpolate() -> None:
    assert round_seconds(DIP) == pytest.approx([1.0, 2.1, 3.2, 1.8])
    assert round_seconds(CostCurve((1, 3), (1.0, 2.0), 0.0)) == pytest.approx([1.0, 1.5, 2.0])


def test_prompt_chunks_do_not_count_as_drafts() -> None:
    """With them, drafts seemed to win at an acceptance of 97 %; by the probe, they never did."""
    narrow = CostCurve((1, 16), (1.0, 16.0), 0.1)
    with_chunk = CostCurve((1, 16, 512), (1.0, 16.0, 20.0), 0.1)
    assert (
        verdict(with_chunk)
        == verdict(narrow)
        == "on this machine, drafting with this pair is slower at any acceptance, so plain decoding and "
        "copies are used"
    )
    assert "unknown" in verdict(CostCurve((1, 512), (1.0, 20.0), 0.1))


@pytest.mark.parametrize(
    ("curve", "acceptance", "n_guesses", "speed_up"),
    [
        (DIP, 0.8, 3, 2.952 / 1.8),  # two guesses: 2.44 / 3.2
        (DIP, 0.0, 0, 1.0),
        (CostCurve((1, 2), (1.0, 1.5), 0.1), 0.5, 0, 1.0),  # one guess: 1.5 / 1.6
        (CostCurve((1, 2), (1.0, 1.5), 0.1), 0.8, 1, 1.8 / 1.6),
        (CostCurve((1, 2, 3), (2.0, 2.0, 2.0), 1.0), 0.5, 0, 1.0),  # in a tie nothing is drafted
        (CostCurve((1, 2, 3), (1.0, 1.0, 1.0), 0.0), 1.0, 2, 3.0),
        (CostCurve((1,), (1.0,), 0.1), 0.9, 0, 1.0),  # nothing but width 1 was measured
    ],
)
def test_the_best_fixed_length(curve: CostCurve, acceptance: float, n_guesses: int, speed_up: float) -> None:
    best = best_length(round_seconds(curve), acceptance)
    assert best == BestFixedLength(n_guesses, pytest.approx(speed_up))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("curve", "acceptance"),
    [
        (CostCurve((1, 2), (1.0, 1.5), 0.1), 0.6),  # (1 + a) / 1.6 > 1
        (CostCurve((1, 2), (1.0, 2.0), 0.1), None),  # 2 tokens in 2.1
        (CostCurve((1, 2), (1.0, 1.2), 0.1), 0.3),  # (1 + a) / 1.3 > 1
        (CostCurve((1, 2, 3), (1.0, 2.5, 1.55), 0.1), 0.5),  # two guesses: 1 + a + a² = 1.75
        (CostCurve((1,), (1.0,), 0.0), None),
    ],
)
def test_break_even_acceptance(curve: CostCurve, acceptance: float | None) -> None:
    expected = None if acceptance is None else pytest.approx(acceptance, abs=1e-9)
    assert break_even(round_seconds(curve)) == expected


@pytest.mark.parametrize(
    ("seconds", "widest"),
    [
        ((1.0, 1.4, 2.2), 4),  # less than 1.5 and 2.5
        ((2.0, 2.1, 5.2), 2),
        ((2.0, 3.2, 3.4), 1),
    ],
)
def test_where_a_curve_saturates(seconds: tuple[float, ...], widest: int) -> None:
    assert saturation_width(CostCurve((1, 2, 4), seconds, 0.0)) == widest
