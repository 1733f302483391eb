"""The figures in the output, compared with values computed by hand: units, shares, signs and names."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from rich.console import Console

from command import Answer, invoke, naming
from llamaspec import ModelOptions
from llamaspec.cli.generate import completion_json, print_reasons, write_timeline
from llamaspec.cli.output import statistics_lines
from llamaspec.length.cost_curve import CostCurve
from llamaspec.measure.compare import Arm, Comparison
from llamaspec.measure.explain import Reasons
from llamaspec.measure.probe import Probe, WidthTiming
from llamaspec.measure.store import keep_probe
from llamaspec.measure.turns import Spread
from llamaspec.plan import DraftPlan, ModelFile
from llamaspec.values import Source, UnusedDraft
from rounds import a_round, a_text, taking
from texts import Letters

REASONS = Reasons(
    lengths={0: 10, 3: 30},
    accepted={"from the draft model": (6, 9), "copied from earlier text": (4, 10)},
    bins={(0.0, 0.1): [], (0.9, 1.0): [*6 * [True], False, False]},
    curve=CostCurve((1, 2, 4), (0.010, 0.012, 0.016), 0.004),
    gained_seconds=1.5,
)


def explained(reasons: Reasons, known: str | None = None) -> list[str]:
    out = io.StringIO()
    print_reasons(reasons, known, Console(file=out, width=120))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_what_explain_says_of_known_reasons() -> None:
    told = explained(REASONS)
    assert told[0].endswith(": 0 in 25%, 3 in 75% of the rounds")
    assert told[1].endswith("6 of 9 verified draft tokens accepted (67%)")
    assert told[4] == "0.9-1.0 75% of 8"
    assert "took 1.50 s less" in told[5]
    assert "10.00 ms in the target, 4.00 ms in the draft" in told[6]
    assert told[9] == "0.50 0 1.00x"
    assert told[-1].endswith("above an acceptance of 49 to 71%")
    assert explained(REASONS, "what is known of the pair") == [*told[:-1], "what is known of the pair"]


def test_lengths_are_not_predicted_if_drafts_lose_at_any_acceptance() -> None:
    told = explained(replace(REASONS, bins={}, curve=CostCurve((1, 9), (0.010, 0.090), 0.004)))
    assert not any("x" in line.split()[-1] for line in told[4:])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gained_seconds": -0.5}, "0.50 s more"),
        ({"accepted": {}}, "nothing was gained"),
        ({"gained_seconds": None}, "gain unknown"),
    ],
)
def test_a_verdict_is_only_as_sure_as_its_data(changes: dict[str, Any], says: str) -> None:
    assert says in replace(REASONS, **changes).outcome


# After a text

TWO_ROUNDS = [
    a_round((1, 2, 3), accepted=2, next_token=4, seconds=(0.25, 1.0, 0.0)),
    a_round((5,), accepted=0, next_token=6, seconds=(0.25, 1.5, 1.0), source=Source.NGRAM),
]


def test_the_lines_after_a_text() -> None:
    text = a_text(TWO_ROUNDS, n_cached=30)
    first, second, third = statistics_lines(replace(text, mask_seconds=0.125), 7, "full")
    assert first.startswith(
        "4 tokens in 4.00 s, 1.0 tokens/s (prompt: 40 tokens, 30 of them cached, in 0.12 s)"
    )
    assert first.endswith("seed 7")
    assert second == "2 of 4 draft tokens accepted (50%), 2.00 tokens per round"
    assert "draft 12.5%, verify 62.5%, overhead 25.0%" in third
    assert third.endswith(" 3.1%"), "the constraint"


def test_the_gain_is_told() -> None:
    plain = a_round(next_token=7, seconds=(0.0, 1.5, 0.5))
    text = a_text([*4 * TWO_ROUNDS, *3 * [plain]])  # 19 tokens in 22 s, 38 s without a draft
    assert statistics_lines(text, 7, "full")[1] == (
        "1.73 times as fast as without drafts (estimate): a round without draft tokens takes 2000.0 ms"
    )
    assert statistics_lines(text, 7, "short") == [
        "19 tokens in 22.00 s, 0.9 tokens/s: 1.7 times as fast as without drafts (estimate)",
        "8 of 16 draft tokens accepted; prompt processed in 0.12 s; stopped at --max-tokens, seed 7",
    ]
    slower = a_text([*4 * TWO_ROUNDS, *3 * [replace(plain, verify_seconds=0.25)]])  # 14.25 s of 18.25 s
    assert ": 22% slower than without drafts (estimate)" in statistics_lines(slower, 7, "short")[0]
    undrafted = statistics_lines(a_text([plain]), 7, "short")
    assert undrafted[0] == "1 token in 2.00 s, 0.5 tokens/s"
    assert undrafted[1].startswith("no draft token was proposed; prompt processed in")
    assert statistics_lines(a_text([plain]), 7, "short", is_plain=True)[1].startswith("prompt processed in")
    copied = statistics_lines(a_text(TWO_ROUNDS[1:]), 7, "short")
    assert copied[1].startswith("0 of 1 copied draft tokens accepted; ")


def timeline(path: Path, vocabulary: Letters) -> Any:
    """Return the data of a timeline of `TWO_ROUNDS`."""
    write_timeline(path, a_text(TWO_ROUNDS), vocabulary, 7)
    found = re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_timeline_has_no_control_characters(tmp_path: Path) -> None:
    class Hostile(Letters):
        def piece(self, token: int) -> bytes:
            return b"a\x1b[31m\n\t"

    assert timeline(tmp_path / "page.html", Hostile())["rounds"][0]["next"] == "a\\x1b[31m\n\t"


def test_draft_tokens_that_were_dropped_are_told_apart() -> None:
    text = a_text(TWO_ROUNDS)
    text = replace(text, summary=replace(text.summary, n_drafted=9))
    assert "2 of 4 draft tokens accepted (50%), 5 not verified" in statistics_lines(text, 7, "full")[1]
    text = replace(text, summary=replace(text.summary, n_verified=0))
    assert statistics_lines(text, 7, "full")[1] == "9 draft tokens proposed, none verified"
    assert statistics_lines(text, 7, "short")[1].startswith("9 draft tokens proposed, none verified; ")


def test_every_figure_of_the_timeline(tmp_path: Path) -> None:
    told = timeline(tmp_path / "page.html", Letters())
    assert (told["prompt"], told["n_tokens"], told["plain"]) == ({"n_tokens": 40, "seconds": 0.125}, 4, None)
    first, second = told["rounds"]
    assert [token["kept"] for token in first.pop("drafted")] == [True, True, False]
    assert first == {
        "draft": 0.25, "verify": 1.0, "rest": 0.0, "accepted": 2, "verified": 3, "copied": False, "next": "e",
    }  # fmt: skip
    assert second["drafted"] == [{"text": "f", "confidence": 0.5, "kept": False}]
    assert (second["rest"], second["copied"]) == (1.0, True)


def a_pair(**others: Any) -> Any:
    return SimpleNamespace(target=SimpleNamespace(path=Path("big.gguf")), heads=None, draft=None,
                           load_seconds=0.75, **others)  # fmt: skip


def test_the_line_of_json_after_a_text() -> None:
    told = completion_json(
        a_text([*TWO_ROUNDS, a_round(next_token=7, seconds=(0.0, 1.5, 0.5))]), a_pair(), 7, "x"
    )
    assert told.pop("statistics") == {
        "rounds": 3,
        "rounds_without_draft": 1,
        "drafted": 4,
        "verified": 4,
        "accepted": 2,
        "acceptance_rate": 0.5,
        "accepted_histogram": [2, 0, 1],
        "mean_tokens_per_round": 5 / 3,
        "tokens_per_second": 5 / 6,
        "seconds": {
            "load": 0.75, "prompt": 0.125, "draft": 0.5, "verify": 4.0, "overhead": 1.5, "decode": 6.0,
            "constraint": 0.0,
        },
        "unused_draft": None,
        "draft_fault": None,
    }  # fmt: skip
    assert told == {
        "text": "", "tokens": [1, 2, 4, 6, 7], "prompt_tokens": 40, "cached_tokens": 0,
        "stop_reason": "limit", "seed": 7, "rule": "x", "target": "big.gguf", "draft": None,
    }  # fmt: skip


def test_the_draft_that_the_line_of_json_names() -> None:
    model = SimpleNamespace(path=Path("small.gguf"))
    for drafts, named in (
        ({"draft": model}, "small.gguf"),
        ({"heads": model}, "small.gguf"),
        ({"heads": SimpleNamespace(path=Path("big.gguf"))}, "mtp"),  # of the target's own file
    ):
        pair = SimpleNamespace(**{**vars(a_pair()), **drafts})
        assert completion_json(a_text(TWO_ROUNDS), pair, 7, "x")["draft"] == named  # type: ignore[arg-type]


# Whether a text is the target's own


@pytest.mark.usefixtures("biased")
def test_compare_says_that_the_text_differs(models: list[Path]) -> None:
    options = ["compare", *naming(models), "-n", "24", "-r", "2", "-k", "4", "--seed", "1"]
    assert invoke(*options, "--json").json["same_text"] is False
    assert "some runs differ" in invoke(*options).stderr


# What a probe found

PROBE = Probe(
    depths=(64, 1024),
    left_out_depths=(4096,),
    widths=(
        WidthTiming(1, (Spread(0.009, 0.010, 0.013), Spread(0.018, 0.020, 0.022)), 0.0),
        WidthTiming(2, (Spread(0.011, 0.011, 0.011), Spread(0.021, 0.021, 0.021)), 0.0),
        WidthTiming(4, (Spread(0.024, 0.030, 0.036), Spread(0.030, 0.040, 0.050)), 0.125),
        WidthTiming(5, (Spread(0.024, 0.024, 0.024), Spread(0.034, 0.034, 0.034)), 0.0),
    ),
    draft_step=Spread(0.002, 0.002, 0.002),
)


@pytest.fixture
def probed(models: list[Path], own_cache: None) -> None:
    """PROBE is the stored result of an earlier probe."""
    target, draft = (ModelFile(path, ModelOptions(threads=1)) for path in models)
    keep_probe(DraftPlan(target, draft), PROBE)


@pytest.mark.usefixtures("probed")
def test_the_table_of_a_probe(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The best length maximises (1 + a + a² ...) / (verify + K draft steps)."""
    monkeypatch.setenv("COLUMNS", "200")
    lines = invoke("probe", *naming(models), "--show").stdout.splitlines()
    told = [" ".join(line.strip("█▌▋▊▉▏▎▍ ").split()) for line in lines]
    rows = [line for line in told if line[:1].isdigit()]
    assert rows[:4] == [
        "1 10.00 ±20% 20.00 ±10% 1.00 0",
        "2 11.00 21.00 1.10 0",
        "4 30.00 ±20% 40.00 ±25% 3.00 0.12",
        "5 24.00 34.00 2.40 0",
    ]
    assert (rows[4], rows[-1]) == ("0.50 1 1.15x", "0.95 1 1.50x")  # 1.5 * 10 / 13
    assert any("10% at batch size 2, 67% at batch size 4" in line for line in told)
    assert told[-1].endswith("above an acceptance of 21 to 39%")


@pytest.mark.usefixtures("probed")
def test_a_probe_on_a_busy_machine_says_so(models: list[Path]) -> None:
    """One such probe had a spread of 195 %, and claimed that drafts are faster, which was wrong."""
    assert "busy" not in invoke("probe", *naming(models), "--show").stdout
    target, draft = (ModelFile(path, ModelOptions(threads=1)) for path in models)
    noisy = replace(PROBE.widths[0], timings=(Spread(0.005, 0.010, 0.013), PROBE.widths[0].timings[1]))
    keep_probe(DraftPlan(target, draft), replace(PROBE, widths=(noisy, *PROBE.widths[1:])))
    assert "the machine was busy" in invoke("probe", *naming(models), "--show").stdout


# What a comparison found


def compared(*, drafts: bool = True, same_file: bool = False) -> Comparison:
    """4 tokens in some seconds; `both` has 1 of 3 draft tokens accepted."""
    alone, draft = [taking(s) for s in (1.0, 2.0, 5.0)], [taking(s) for s in (0.5, 0.5, 0.25)]
    both = [taking(s) for s in (0.5, 0.8, 2.0)]
    if drafts:
        plain = [a_round(next_token=token, seconds=(0.0, 0.0, 0.0)) for token in (3, 4)]
        both = [
            a_text([a_round((1, 9, 9), accepted=1, next_token=2, seconds=(0.0, s, 0.0)), *plain])
            for s in (0.5, 0.8, 2.0)
        ]
    arms = [Arm(name, tuple(runs)) for name, runs in (("alone", alone), ("draft", draft), ("both", both))]
    return Comparison(tuple(arms), same_file)


def shown(found: Comparison, monkeypatch: pytest.MonkeyPatch, models: list[Path], *options: str) -> Answer:
    monkeypatch.setattr("llamaspec.cli.measure.run_compare", lambda *_: found)
    return invoke("compare", *naming(models), "-n", "4", "--seed", "3", *options)


def test_what_a_comparison_says_about_its_drafts(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "should be rejected" in shown(compared(same_file=True), monkeypatch, models).stderr
    assert "any difference is noise" in shown(compared(drafts=False), monkeypatch, models).stdout


@pytest.mark.usefixtures("own_cache")  # without the verdicts of other tests
def test_the_line_of_a_comparison(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    found = shown(compared(), monkeypatch, models, "--json").json
    both = found.pop("arms")[2]
    assert found == {
        "seed": 3, "rule": "coupled", "same_file": False, "same_text": True,
        "acceptance_rate": pytest.approx(1 / 3), "drafted": 9, "verdict": None, "interrupted": False,
    }  # fmt: skip
    assert both.pop("runs")[1] == {
        "tokens": 4, "seconds": 0.8, "prefill_seconds": 0.125, "acceptance_rate": pytest.approx(1 / 3),
    }  # fmt: skip
    assert both == {
        "method": "both",
        "tokens_per_second": pytest.approx(5.0),
        "speed_up": pytest.approx(2.3208, abs=1e-4),
        "speed_up_interval": pytest.approx([1.50, 3.60], abs=0.01),
        "median_seconds": pytest.approx(0.8),
        "seconds_quartiles": pytest.approx([0.65, 1.4]),
        "mean_seconds": pytest.approx(1.1),
        "std_seconds": pytest.approx(0.63**0.5),
    }


@pytest.mark.parametrize(
    ("reading", "says"),
    [(7.25, "it would have taken 7.2 s to process the prompt, and saved about 2.5 s"), (0.05, "")],
)
def test_a_draft_that_was_not_used_is_told_with_its_price(reading: float, says: str) -> None:
    told = replace(a_text(TWO_ROUNDS), unused_draft=UnusedDraft(reading, 2.5))
    details: tuple[Literal["short", "full"], ...] = ("short", "full")
    for detail in details:
        lines = [line for line in statistics_lines(told, 7, detail) if "not used" in line]
        assert len(lines) == bool(says)
        assert all(says in line for line in lines)
