"""`llamaspec probe`: what it measures, keeps and prints."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from command import invoke, naming
from llamaspec import LlamaModel, Pair
from llamaspec.length.cost_curve import CostCurve, credible
from llamaspec.length.costs import Costs
from llamaspec.llama import runtime
from llamaspec.measure.machine import LoadWatch
from llamaspec.measure.probe import Effort, Probe, WidthTiming, measure
from llamaspec.measure.turns import Spread
from llamaspec.measure.verdict import in_words, verdict

pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_curve_that_ends_early_tells_nothing() -> None:
    steep = CostCurve((1, 2, 4), (1.0, 2.1, 4.2), 0.05)
    assert verdict(steep).endswith("unknown: batch sizes were timed only up to 4")


def test_json_has_the_widths_the_conclusions_and_the_verdict(models: list[Path]) -> None:
    found = invoke("probe", *naming(models), "--quick", "--json").json
    assert [row["width"] for row in found["widths"]][:4] == [1, 2, 3, 4]
    assert all(len(row["timings"]) == len(found["depths"]) == 2 for row in found["widths"])
    assert all(t["low"] <= t["median"] <= t["high"] for row in found["widths"] for t in row["timings"])
    assert found["widths"][0]["logit_difference"] == 0
    assert found["identical_widths"][0] == 1
    assert found["draft_step"]["median"] > 0
    assert found["kernels"] == runtime.kernels().level
    assert set(found["best_fixed_length"]) == {"0.5", "0.6", "0.7", "0.8", "0.9", "0.95"}
    widths, costs = zip(
        *((row["width"], row["timings"][0]["median"]) for row in found["widths"]), strict=True
    )
    assert found["verdict"] == verdict(CostCurve(widths, credible(costs), found["draft_step"]["median"]))


def test_a_wider_batch_is_never_cheaper() -> None:
    """A busy machine gave -51 % as the cost of another position, and that was kept."""
    held_up = [WidthTiming(width, (Spread(t, t, t),), 0.0) for width, t in ((1, 0.2), (2, 0.1), (4, 0.3))]
    curve = Probe((64,), (), tuple(held_up), None).curve
    assert curve.verify_seconds == (0.2, 0.2, 0.3)
    assert "0% at batch size 2" in in_words(curve)[1]
    assert "-" not in in_words(CostCurve((1, 2), (0.2, 0.1), 0.0))[1]  # kept by an earlier release
    costs = Costs(CostCurve((1, 2), (0.2, 0.1), 0.0)).learned()
    assert costs.verify_seconds[1] == costs.verify_seconds[0]


def test_what_other_programs_slow_down_is_said_and_not_kept(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only bench said so."""
    monkeypatch.setattr(LoadWatch, "n_taken", lambda _: 1000.0)
    pair = naming(models)
    for command in (
        ("probe", *pair, "--quick"),
        ("compare", *pair, "-r", "1", "-n", "8", "-p", "x"),
        ("generate", *pair, "-n", "8", "--explain", "x"),
    ):
        assert "warning: other programs used 1000.0 of " in invoke(*command).stderr
    assert "not been probed" in invoke("probe", *pair, "--show").stderr


def test_what_was_found_is_shown_again_and_forgotten(models: list[Path]) -> None:
    options = naming(models)
    assert "without --show" in invoke("probe", *options, "--show").stderr
    assert "no such model file" in invoke("probe", "--target", "missing.gguf", "--forget").stderr
    first = invoke("probe", *options, "--quick", "--json").json
    assert invoke("probe", *options, "--show", "--json").json == first
    assert f"computed with {runtime.kernels().describe()}" in invoke("probe", *options, "--show").stdout
    assert (
        "without --show" in invoke("probe", *options, "--threads", "2", "--show").stderr
    )  # of another machine
    for told in (
        "llamaspec: deleted the stored result",
        "llamaspec: there is no stored result for this pair",
    ):
        forgot = invoke("probe", *options, "--forget")
        assert (forgot.code, forgot.stdout, forgot.complaints) == (0, "", [told])
    assert "without --show" in invoke("probe", *options, "--show").stderr


def test_it_ends_when_its_time_is_over(models: list[Path]) -> None:
    ticks = itertools.count()
    with LlamaModel(models[0]) as target, LlamaModel(models[1]) as draft:
        pair = Pair(target, draft, clock=lambda: float(next(ticks)))
        effort = Effort(widths=(1, 2), depths=(8,), most_turns=50, seconds=1.0)
        probe = measure(pair, effort)
    assert all(row.timings[0].median == 1 for row in probe.widths)
    assert next(ticks) < 400
