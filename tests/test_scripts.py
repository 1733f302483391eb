"""The report of scripts/demo.py."""

from __future__ import annotations

from demo import Probed, most_gained, report


def test_the_demo_reports_every_quantisation_and_compares_the_best() -> None:
    found = [Probed("Q4_0", 1.0, 0, "drafting does not pay"), Probed("F16", 2.05, 5, "not below 0.31")]
    assert most_gained(found).kind == "F16"
    assert report(found).splitlines()[1:] == [
        "  Q4_0  nothing: drafting does not pay",
        "  F16   2.05 times the speed with 5 draft tokens a round: not below 0.31",
        "Comparing on F16, where it should gain most:",
    ]
