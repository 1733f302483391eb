"""What `make demo` says of the quantisations, and which it compares on."""

from __future__ import annotations

from demo import Found, most_gained, report

FOUND = [
    Found("Q4_0", 1.0, 0, "drafting does not pay"),
    Found("Q8_0", 1.31, 3, "not below 0.52"),
    Found("F16", 2.05, 5, "not below 0.31"),
]


def test_the_comparison_is_where_drafts_gain_most() -> None:
    assert most_gained(FOUND).kind == "F16"
    assert most_gained(FOUND[:2]).kind == "Q8_0"


def test_every_quantisation_is_told() -> None:
    assert report(FOUND).splitlines() == [
        "If 70% of the draft tokens are accepted, drafting here should give",
        "  Q4_0  nothing: drafting does not pay",
        "  Q8_0  1.31 times the speed with 3 draft tokens a round: not below 0.52",
        "  F16   2.05 times the speed with 5 draft tokens a round: not below 0.31",
        "Comparing on F16, where it should gain most:",
    ]
