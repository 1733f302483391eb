"""The figures that people are shown, against values made by hand: units, shares, signs, and who was who."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from command import invoke, naming
from llamaspec import LlamaModel
from llamaspec.cli.explain import explain, verdict
from llamaspec.cli.report import full_statistics, statistics_lines
from llamaspec.cli.timeline import conclusion, write_timeline
from llamaspec.measure.reasons import ConfidenceBin, LengthCount, Reasons, WidthCost
from llamaspec.values import ForwardRequest, Logits, Source
from rounds import a_round, a_text
from texts import Letters

REASONS = Reasons(
    lengths=(LengthCount(0, 10), LengthCount(3, 30)),
    widths=(WidthCost(1, 0.010, 12, 1), WidthCost(3, 0.025, 0, 4), WidthCost(4, 0.020, 7, 4)),
    draft_step_seconds=0.004,
    overhead_seconds=0.0015,
    bins=(ConfidenceBin(0.0, 0.1, 0, 0, 0.05), ConfidenceBin(0.9, 1.0, 8, 6, 0.9)),
    acceptance=0.75,
    n_ngram_verified=10,
    n_ngram_accepted=4,
    break_even_acceptance=0.5,
    break_even_is_known=True,
    n_predicted_tokens=100,
    predicted_seconds=4.0,
    measured_seconds=5.0,
    gained_seconds=1.5,
    n_tries=7,
    explored_seconds=0.25,
)


def explained(reasons: Reasons) -> list[str]:
    out = io.StringIO()
    explain(reasons, Console(file=out, width=120), frozenset({4, 1}))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_what_explain_says_of_known_reasons() -> None:
    assert explained(REASONS) == [
        "draft tokens per round: 0 in 25%, 3 in 75%",
        "bit-identical widths: 1, 4",
        "positions at once ms rounds timed evaluated as",
        "1 10.00 12",
        "3 25.00 0 4",
        "4 20.00 7",
        "overhead of a round: 1.50 ms",
        "a draft token costs 4.00 ms",
        "confidence verified accepted estimated",
        "0.0-0.1 0 5%",
        "0.9-1.0 8 75% 90%",
        "looked up in earlier text: 4 of 10 verified draft tokens accepted (40%)",
        "speed: predicted 25.0 tokens/s for the rounds that happened, measured 20.0",
        "against plain decoding: 1.50 s won; 0.25 s lost in 7 rounds of exploration",
        "drafting pays here now: it needs an acceptance of 0.50, the next draft token has 0.75",
    ]


def test_what_explain_says_of_a_loss() -> None:
    told = explained(replace(REASONS, gained_seconds=-0.5, acceptance=0.25))
    assert "against plain decoding: 0.50 s lost; 0.25 s lost in 7 rounds of exploration" in told
    assert told[-1].startswith("drafting does not pay here now: it needs an acceptance of 0.50")
    assert told[-1].endswith("the next draft token has 0.25")


@pytest.mark.parametrize(("gained", "says"), [(0.5, "pays in"), (-0.5, "does not pay in")])
def test_the_verdict_on_text_that_is_looked_up(gained: float, says: str) -> None:
    looked_up = replace(REASONS, acceptance=None, gained_seconds=gained)
    assert verdict(looked_up) == f"looking draft tokens up in earlier text {says} this text"


# After a text

TWO_ROUNDS = [
    a_round((1, 2, 3), accepted=2, next_token=4, seconds=(0.25, 1.0, 0.0)),
    a_round((5,), accepted=0, next_token=6, seconds=(0.25, 1.5, 1.0), source=Source.NGRAM),
]


def test_the_lines_after_a_text() -> None:
    assert full_statistics(a_text(TWO_ROUNDS), 7) == [
        "4 tokens in 4.00 s, 1.0 tokens/s (prompt: 40 tokens in 0.12 s), stopped by limit, seed 7",
        "2 of 4 draft tokens accepted (50%), 2.00 tokens per round",
        "time: draft 12.5%, verify 62.5%, overhead 25.0%",
    ]
    cached = full_statistics(a_text(TWO_ROUNDS, n_cached=30), 7)[0]
    assert "(prompt: 40 tokens, 30 of them cached, in 0.12 s)" in cached


def test_the_gain_is_told_in_plain_words() -> None:
    plain = a_round(next_token=7, seconds=(0.0, 1.5, 0.5))
    text = a_text([*TWO_ROUNDS, plain])
    assert full_statistics(text, 7)[1] == (
        "1.67 times as fast as without a draft: 2000.0 ms a token where none was drafted in this text"
    )
    assert statistics_lines(text, 7, "short") == [
        "5 tokens in 6.00 s, 0.8 tokens/s: 1.7 times as fast as without a draft",
        "2 of them came from drafts, 2 more were drafted in vain; the prompt took 0.12 s; "
        "stopped by limit, seed 7",
    ]
    assert statistics_lines(text, 7, "full") == full_statistics(text, 7)
    slower = a_text([*TWO_ROUNDS, replace(plain, verify_seconds=0.25)])
    assert "0.79 times as fast as without a draft" in statistics_lines(slower, 7, "short")[0]
    undrafted = statistics_lines(a_text([plain]), 7, "short")
    assert undrafted[0] == "1 tokens in 2.00 s, 0.5 tokens/s"
    assert undrafted[1].startswith("nothing was drafted; the prompt took")


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        (2.0, "took 60% of the time that plain"),
        (0.5, "did not pay: this text took 1.80 times"),
    ],
)
def test_the_conclusion_of_the_timeline(plain: float, says: str) -> None:
    rounds = [*TWO_ROUNDS, a_round(next_token=7, seconds=(0.0, plain, 0.0))]
    assert says in conclusion(a_text(rounds))
    assert conclusion(a_text(rounds[2:])) == "Nothing was drafted: this is plain decoding."


def test_the_timeline_has_no_control_characters(tmp_path: Path) -> None:
    class Hostile(Letters):
        def piece(self, token: int) -> bytes:
            return b"a\x1b[31m\n\t"

    page = tmp_path / "page.html"
    write_timeline(page, a_text(TWO_ROUNDS), Hostile(), "a summary")
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    said = json.loads(found[1])["rounds"][0]["next"]
    assert said == "a\\x1b[31m\n\t"


def test_draft_tokens_that_were_dropped_are_told_apart() -> None:
    text = a_text(TWO_ROUNDS)
    text = replace(text, summary=replace(text.summary, n_drafted=9))
    assert "2 of 4 draft tokens accepted (50%), 5 dropped before" in full_statistics(text, 7)[1]
    text = replace(text, summary=replace(text.summary, n_verified=0))
    assert full_statistics(text, 7)[1] == "no draft tokens verified, 9 dropped before verification"


def test_every_figure_of_the_timeline(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_timeline(page, a_text(TWO_ROUNDS), Letters(), "a summary")
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    assert json.loads(found[1]) == {
        "summary": "a summary",
        "conclusion": "Every round had a draft, so this run does not tell what plain decoding takes.",
        "prompt": {"n_tokens": 40, "seconds": 0.125},
        "n_tokens": 4,
        "plain": None,
        "rounds": [
            {
                "draft": 0.25, "verify": 1.0, "rest": 0.0, "accepted": 2, "verified": 3, "copied": False,
                "drafted": [
                    {"text": "b", "confidence": 0.5, "parent": -1, "kept": True},
                    {"text": "c", "confidence": 0.6, "parent": 0, "kept": True},
                    {"text": "d", "confidence": 0.7, "parent": 1, "kept": False},
                ],
                "next": "e",
            },
            {
                "draft": 0.25, "verify": 1.5, "rest": 1.0, "accepted": 0, "verified": 1, "copied": True,
                "drafted": [{"text": "f", "confidence": 0.5, "parent": -1, "kept": False}],
                "next": "g",
            },
        ],
    }  # fmt: skip
    assert 'const ms = seconds => (1000 * seconds).toFixed(2) + " ms";' in page.read_text()
    assert "draft ${ms(r.draft)}, verify ${ms(r.verify)}, overhead ${ms(r.rest)}" in page.read_text()
    assert "${r.accepted} of ${r.verified}" in page.read_text()


# Whether a text is the target's own


@pytest.fixture
def biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that rounds wider batches otherwise, by far."""
    honest = LlamaModel.evaluate

    def biased(self: LlamaModel, batch: list[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        answers = honest(self, batch, n_padding)
        if batch[0][1].n_scored == 1:
            return answers
        return [logits[:, ::-1] for logits in answers]

    monkeypatch.setattr(LlamaModel, "evaluate", biased)


@pytest.mark.usefixtures("biased")
def test_compare_says_that_the_text_differs(models: list[Path]) -> None:
    options = ["compare", *naming(models), "-n", "24", "-r", "2", "-k", "4", "--seed", "1"]
    assert invoke(*options, "--json").json["same_text"] is False
    told = invoke(*options).stderr
    assert "the text is the target's own" not in told
    assert "in some run the text differs from the target's own" in " ".join(told.split())


@pytest.mark.usefixtures("biased")
def test_audit_names_the_first_difference_and_the_forks(models: list[Path]) -> None:
    options = ["audit", *naming(models), "-n", "24", "-k", "4", "-t", "0"]
    found: dict[str, Any] = invoke(*options, "--json").json
    answer = invoke(*options)
    assert answer.code == 1
    lines = answer.stdout.splitlines()
    assert lines[0] == f"the texts differ from token {found['first_difference']} on"
    assert lines[1] == f"replayed one token at a time: {len(found['forks'])} forks in 24 tokens"
    assert len([line for line in lines if line.startswith("  token ")]) == len(found["forks"]) > 0
    assert "bit-identical with width 1 here: none" in answer.stdout
