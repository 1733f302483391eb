"""`llamaspec audit`: whether drafting changes the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import invoke, naming
from llamaspec import LlamaModel
from llamaspec.llama import runtime


def test_a_sound_pair_passes(target_file: Path, draft_file: Path) -> None:
    answer = invoke("audit", *naming([target_file, draft_file]), "-t", "0.8", "-n", "40", "-k", "3", "--json")
    assert answer.code == 0
    assert answer.json["passed"] is True
    assert (answer.json["n_tokens"], answer.json["forks"]) == (40, [])


@pytest.mark.skipif(runtime.kernels().level is None, reason="the kernels are off")
def test_texts_are_the_same_to_the_bit_in_every_situation(
    demo_files: tuple[Path, Path], own_cache: None
) -> None:
    found = invoke("audit", *naming([*demo_files]), "--exact", "-k", "3", "-n", "20", "--json")
    assert found.code == 0
    assert set(found.json["n_changed"].values()) == {0}
    assert len(found.json["n_changed"]) == 4
    assert (found.json["n_compared"], found.json["why_inexact"]) == (20, None)
    told = invoke("audit", *naming([*demo_files]), "-n", "20").stdout.splitlines()
    assert "log-probabilities beside 3 other requests: the same" in told
    assert told[-1] == "llamaspec's kernels compute everything: the same seed gives the same text to the bit"


@pytest.mark.parametrize(
    ("reason", "code", "says"),
    [
        ("llama.cpp computes it; wait", 0, "come from rounding and do not fail the audit"),
        ("llama.cpp computes it; wait", 0, "up to rounding: llama.cpp computes it; wait"),
        (None, 1, "everything, so this is a fault; please report it"),
    ],
)
def test_changed_log_probabilities_are_judged(
    demo_files: tuple[Path, Path],
    own_cache: None,
    monkeypatch: pytest.MonkeyPatch,
    reason: str | None,
    code: int,
    says: str,
) -> None:
    """It used to print "40 of 40 differ" above exit code 0 without a word."""
    changed = {"after a cached prompt": 4}
    monkeypatch.setattr("llamaspec.measure.audit.changes", lambda *_: changed.items())
    monkeypatch.setattr(LlamaModel, "why_inexact", lambda _: reason)
    answer = invoke("audit", *naming([*demo_files]), "-n", "4", "--threads", "1")
    assert answer.code == code
    assert says in answer.stdout


@pytest.mark.parametrize("command", ["audit", "generate", "compare"])
def test_exact_refuses_to_run_if_results_may_differ(
    target_file: Path, draft_file: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(LlamaModel, "why_inexact", lambda _: "llama.cpp computes it; wait")
    answer = invoke(command, *naming([target_file, draft_file]), "--exact", "-n", "4", "-p", "x")
    assert (answer.code, answer.stdout) == (1, "")
    assert answer.complaints == ["llamaspec: --exact is impossible: llama.cpp computes it; wait"]


def test_nothing_is_tried_without_exact(
    target_file: Path, draft_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(LlamaModel, "why_inexact")
    assert invoke("generate", *naming([target_file, draft_file]), "-n", "4", "x").code == 0


@pytest.mark.usefixtures("biased")
def test_a_machine_that_rounds_wider_batches_otherwise_is_found_out(
    target_file: Path, draft_file: Path
) -> None:
    answer = invoke("audit", *naming([target_file, draft_file]), "-t", "0", "-n", "40", "-k", "3", "--json")
    assert answer.code == 1
    found = answer.json
    assert found["passed"] is False
    assert found["first_difference"] is not None
    assert found["forks"]
    assert max(fork["width"] for fork in found["forks"]) == 4
    assert all(fork["logit_gap"] > 0 for fork in found["forks"])


RULES = [("rejection", "0"), ("rejection", "1")]


@pytest.mark.parametrize(("rule", "temperature"), RULES)
def test_texts_are_compared_where_they_must_be_the_same(
    target_file: Path, draft_file: Path, rule: str, temperature: str
) -> None:
    options = [*naming([target_file, draft_file]), "--rule", rule, "-t", temperature, "-n", "40", "-k", "3"]
    answer = invoke("audit", *options, "--json")
    assert (answer.code, answer.json["rule"], answer.json["forks"]) == (0, rule, [])
    assert answer.json["compares_texts"] == (rule == "coupled" or temperature == "0")


@pytest.mark.usefixtures("biased")
def test_tokens_that_the_target_alone_cannot_say_are_forks_under_any_rule(
    target_file: Path, draft_file: Path
) -> None:
    options = ("--rule", "block", "-t", "0.5", "-n", "40", "-k", "3", "--json")
    answer = invoke("audit", *naming([target_file, draft_file]), *options)
    assert answer.code == 1
    assert answer.json["forks"]
