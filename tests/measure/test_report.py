"""A report says nothing of its user, and one from a stranger can say nothing but figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import write_command_docs
from llamaspec.errors import LlamaspecError
from llamaspec.length.costs import CostCurve
from llamaspec.length.policy import LearnedPrior
from llamaspec.llama.options import ModelOptions
from llamaspec.measure.bench import Sample
from llamaspec.measure.report import Report, make_report, markdown, public_options, read_report
from llamaspec.measure.served_arms import Answer
from llamaspec.measure.store import ModelFile, PairFiles, store_prior

SECRETS = ("/home/alice/x.gguf", "alice's words", "bob's words")


def sample(arm: str, prompt: str, seconds: float, text: str) -> Sample:
    return Sample(arm, "chat and code", "ask", prompt, 0, Answer(text, text, 7, 11, seconds, 1.0, 8, 5))


@pytest.fixture
def report(target_file: Path, draft_file: Path, own_cache: None) -> Report:
    options = ModelOptions(threads=1)
    files = PairFiles(ModelFile(target_file, options), ModelFile(draft_file, options))
    store_prior(files, LearnedPrior(CostCurve((1, 2, 4), (0.02, 0.03, 0.05), 0.004)))
    also = "--draft /home/alice/x.gguf -k 4"
    samples = [
        sample("plain", "ask 1", 21.0, SECRETS[1]), sample("auto", "ask 1", 7.0, SECRETS[1]),
        sample(also, "ask 1", 14.0, SECRETS[2]), sample(f"{also} ", "ask 1", 42.0, SECRETS[1]),
    ]  # fmt: skip
    settings = {"max_tokens": 9, "temperature": 0.0, "repeats": 1}
    given = ["--target", str(target_file), "--threads", "1", "--cache-type-k", "q8_0"]
    return make_report(samples, files, settings, ["ask", "write code"], given, None, with_hashes=True)


def test_a_report_tells_figures_and_no_names(report: Report, target_file: Path, tmp_path: Path) -> None:
    told = json.dumps(asdict(report))
    assert not any(secret in told for secret in (*SECRETS, str(target_file), str(tmp_path)))
    assert report.settings.options == "--target ... --threads 1 --cache-type-k q8_0"
    arms = report.groups["chat and code"]
    assert [*arms] == ["plain", "auto", "--draft ... -k 4", "--draft ... -k 4 (3)"]
    assert [each.whole for each in arms.values()] == pytest.approx([1.0, 3.0, 1.5, 0.5])
    assert [each.differs_at for each in report.samples] == [None, None, 0, None]
    assert report.curve == CostCurve((1, 2, 4), (0.02, 0.03, 0.05), 0.004)
    path = tmp_path / "r.json"
    path.write_text(told)
    assert read_report(path) == report


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["-k", "4", "--exact"], "-k 4 --exact"),
        (["--pair", "secret", "--tensor-split", "3,1.5"], "--pair ... --tensor-split 3,1.5"),
        (["--flash-attn", "off", "--rpc", "10.0.0.7:50052"], "--flash-attn off --rpc ..."),
        (["--Name", "-/etc"], "... ..."),
    ],
)
def test_options_keep_their_names_and_numbers(words: list[str], shown: str) -> None:
    assert public_options(words) == shown


def test_markdown_of_known_figures(report: Report) -> None:
    lines = markdown(report).splitlines()
    assert lines[0].startswith("### `")
    assert "Evaluating 2, 4 positions at once costs 1.50, 2.50 single ones; a draft step 0.20." in lines
    options = "--target ... --threads 1 --cache-type-k q8_0"
    assert f"`llamaspec bench {options} --task ask --task 'write code' -n 9 -t 0 -r 1`" in lines
    at = lines.index("**`chat and code`**")
    assert lines[at + 2] == "| arm | whole | spread | worst | prompt | s | TTFT | decoding | same |"
    assert lines[at + 5] == "| `auto` | 3.00 | 1.00 | 3.00 | `ask 1` | 7.00 | 1.00 | 3.33 | 1/1 |"


HARM = ("a`b", "a|b", "<script>", "a\nb", "\x1b[2J", "a\\", 601 * "a", "\u202ea", '"')


def _set(*place: Any) -> Callable[[Any, Any], None]:
    def change(told: Any, value: Any) -> None:
        for key in place[:-1]:
            told = told[key]
        told[place[-1]] = value

    return change


def _rename(told: Any, value: Any) -> None:
    told["groups"][value] = told["groups"].pop("chat and code")


@pytest.mark.parametrize("value", HARM)
@pytest.mark.parametrize(
    "change",
    [
        _set("target", "name"), _set("machine", "devices", 0), _set("settings", "options"), _rename,
        _set("versions", "llamaspec"), _set("samples", 1, "prompt"),
        _set("groups", "chat and code", "auto", "worst_prompt"),
    ],
)  # fmt: skip
def test_no_text_of_a_stranger_is_markup(
    report: Report, tmp_path: Path, change: Callable[[Any, Any], None], value: str
) -> None:
    told = json.loads(json.dumps(asdict(report)))
    change(told, value)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(told))
    with pytest.raises(LlamaspecError, match="is no report of bench --share"):
        read_report(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("format",), 2),
        (("machine", "cores"), -1),
        (("machine", "cores"), "2"),
        (("machine", "host"), "here"),
        (("target", "n_bytes"), 1 << 61),
        (("groups", "chat and code", "auto", "whole"), float("nan")),
        (("groups", "chat and code", "auto", "whole"), "fast"),
        (("samples",), None),
        (("tasks",), {}),
        (("tasks", "other"), {}),
        (("curve", "widths"), [1, 1, 4]),
    ],
)
def test_no_number_of_a_stranger_is_taken_unseen(
    report: Report, tmp_path: Path, place: tuple[str, ...], value: object
) -> None:
    told = json.loads(json.dumps(asdict(report)))
    _set(*place)(told, value)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(told))
    with pytest.raises(LlamaspecError, match="is no report of bench --share"):
        read_report(path)


@pytest.mark.parametrize("content", ["", "[]", "{", 5000 * "[", " " * (4 << 20) + "{}"])
def test_what_is_no_report_is_told_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(LlamaspecError) as caught:
        read_report(path)
    assert len(str(caught.value)) < 400 + len(str(path))
    assert "\n" not in str(caught.value)


def test_a_picture_has_the_texts_of_a_stranger_letter_by_letter(report: Report, tmp_path: Path) -> None:
    named = replace(report, target=replace(report.target, name="a $x_{$ & b"))
    (tmp_path / "a.json").write_text(json.dumps(asdict(named)))
    write_command_docs.draw_results(tmp_path, tmp_path / "pictures")
    drawn = (tmp_path / "pictures" / "a.svg").read_text()
    assert "a $x_{$ &amp; b" in drawn
    assert ">3.00<" in drawn, "times as fast as plain"
    write_command_docs.draw_results(tmp_path, tmp_path / "again")
    assert (tmp_path / "again" / "a.svg").read_text() == drawn


def test_the_page_is_rendered_of_the_files(report: Report, tmp_path: Path) -> None:
    page = f"before\n{write_command_docs.BEGIN}old\n{write_command_docs.END}after\n"
    empty = write_command_docs.with_results(page, tmp_path)
    assert re.sub(r"\n+", "\n", empty) == page.replace("old\n", "")
    for name in ("b-m4.json", "a.json"):
        (tmp_path / name).write_text(json.dumps(asdict(report)))
    once = write_command_docs.with_results(empty, tmp_path)
    assert [line for line in once.splitlines() if line.startswith("From")] == [
        "From `benchmarks/a.json`.",
        "From `benchmarks/b-m4.json`.",
    ]
    assert once.count(markdown(report)) == 2
    assert once.endswith("after\n")
    assert write_command_docs.with_results(once, tmp_path) == once
    (tmp_path / "a](x).json").write_text("{}")
    with pytest.raises(LlamaspecError, match="is no name for a result"):
        write_command_docs.with_results(once, tmp_path)
