"""A report holds nothing about its user, and a stranger's report can show nothing but figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import draw_benchmarks
import write_command_docs
from llamaspec.errors import LlamaspecError
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.prior import LearnedPrior
from llamaspec.llama.options import ModelOptions
from llamaspec.measure.bench import Sample
from llamaspec.measure.report import (
    Report,
    Settings,
    is_comparable,
    make_report,
    markdown,
    public_options,
    read_report,
)
from llamaspec.measure.served_arms import PEER_BEST, PEER_PLAIN
from llamaspec.measure.store import keep
from llamaspec.plan import DraftPlan, ModelFile

MOD, SIMPLE = "llama-server, ngram-mod", "llama-server, draft-simple"
SECRET = "/home/alice/x.gguf"


def sample(arm: str, prompt: str, seconds: float, differs_at: int | None = None) -> Sample:
    return Sample(arm, "chat and code", "ask", prompt, 0, 7, 11, seconds, 1.0, 8, 5, differs_at)


@pytest.fixture
def report(pair: DraftPlan) -> Report:
    also = f"--draft {SECRET} -k 4"
    samples = [
        sample("plain", "ask 1", 21.0), sample("auto", "ask 1", 7.0),
        sample(also, "ask 1", 14.0, 0), sample(f"{also} ", "ask 1", 42.0),
    ]  # fmt: skip
    given = ["--target", str(pair.target.path), "--threads", "1", "--cache-type-k", "q8_0"]
    settings = Settings(9, tasks=("ask", "write code"), options=public_options(given))
    return make_report(samples, pair, settings, None, with_hashes=True)


@pytest.fixture
def beside_the_peer(pair: DraftPlan) -> Report:
    """Our plain decoding is the slowest; llama-server's best type is ngram-mod, but not for every prompt."""
    seconds = {
        "plain": (9.0, 12.0), "auto": (2.0, 8.0),
        PEER_PLAIN: (6.0, 8.0), MOD: (2.0, 10.0), SIMPLE: (5.0, 8.0),
    }  # fmt: skip
    samples = [
        sample(arm, f"ask {i}", taken) for arm, each in seconds.items() for i, taken in enumerate(each)
    ]
    samples += [
        replace(each, group="edits", task="edit", prompt="edit") for each in samples if each.prompt == "ask 1"
    ]
    return make_report(samples, pair, Settings(), "77 (abc)", with_hashes=False)


@pytest.fixture
def pair(target_file: Path, draft_file: Path, own_cache: None) -> DraftPlan:
    options = ModelOptions(threads=1)
    files = DraftPlan(ModelFile(target_file, options), ModelFile(draft_file, options))
    keep(files, LearnedPrior(CostCurve((1, 2, 4), (0.02, 0.03, 0.05), 0.004)))
    return files


def test_a_report_holds_figures_and_no_names(report: Report, target_file: Path, tmp_path: Path) -> None:
    content = json.dumps(report.as_json())
    assert not any(secret in content for secret in (SECRET, str(target_file), str(tmp_path)))
    assert report.settings.options == "--target ... --threads 1 --cache-type-k q8_0"
    arms = report.groups["chat and code"]
    assert [*arms] == ["plain", "auto", "--draft ... -k 4", "--draft ... -k 4 (3)"]
    assert [each.whole for each in arms.values()] == pytest.approx([1.0, 3.0, 1.5, 0.5])
    assert [each.differs_at for each in report.samples] == [None, None, 0, None]
    assert report.curve == CostCurve((1, 2, 4), (0.02, 0.03, 0.05), 0.004)
    path = tmp_path / "r.json"
    path.write_text(content)
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
    assert any("2, 4 cost 1.50, 2.50 times a single token; a draft token 0.20" in line for line in lines)
    assert any(line.endswith("-n 9 -t 0 -r 1`. Ratios are to plain decoding.") for line in lines)
    at = lines.index("**`chat and code`**")
    assert lines[at + 5] == "| `auto` | 3.00 | 1.00 | 3.00 | `ask 1` | 3.33 | 1.00 | 3.00 |"
    assert lines[at + 9] == "| arm | s | first s | total s | same text | accepted drafts |"
    assert lines[at + 11] == "| `plain` | 21.00 | 1.00 | 21.00 |  | 5/8 |"
    assert lines[at + 12].startswith("| `auto` | 7.00 | 1.00 | 7.00 | 1/1 |")
    assert "next to" not in markdown(report)


def test_with_llama_server_everything_is_compared_with_it(beside_the_peer: Report, tmp_path: Path) -> None:
    found = beside_the_peer
    assert (found.baseline, found.best_type) == (PEER_PLAIN, MOD)
    assert [*found.groups] == ["chat and code", "edits", "all tasks"]
    assert [*found.groups["edits"]] == ["plain", "auto", PEER_PLAIN, MOD, SIMPLE, PEER_BEST]
    assert found.groups["edits"]["plain"].whole == pytest.approx(8 / 12)
    assert found.to_best_type["edits"].whole == pytest.approx(10 / 8)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(found.as_json()))
    assert read_report(path) == found
    lines = markdown(found).splitlines()
    assert any(line.endswith("Ratios are to llama-server without a draft.") for line in lines)
    at = lines.index("**`edits`**")
    assert f"`{MOD} (best type)`" in lines[at + 7]
    assert lines[at + 20].startswith(f"`auto` next to `{MOD}`: whole 1.25, worst 1.25 (`edit`)")


def test_answers_are_compared_if_both_arms_draw_alike(beside_the_peer: Report, report: Report) -> None:
    """At temperature 0 all arms should answer alike; above, another program draws other tokens."""

    def compared(of: Report, temperature: float) -> list[str]:
        asked = replace(of, settings=replace(of.settings, temperature=temperature))
        return [arm for arm in next(iter(of.groups.values())) if is_comparable(arm, asked)]

    assert compared(beside_the_peer, 0.0) == ["plain", "auto", MOD, SIMPLE, PEER_BEST]
    assert compared(beside_the_peer, 0.8) == []
    assert len(compared(report, 0.8)) == 3


HARM = ("a`b", "a|b", "<script>", "a\nb", "\x1b[2J", "a\\", 601 * "a", "\u202ea", '"')


def _set(*place: Any) -> Callable[[Any, Any], None]:
    def change(content: Any, value: Any) -> None:
        for key in place[:-1]:
            content = content[key]
        content[place[-1]] = value

    return change


def _in_samples(name: str) -> Callable[[Any, Any], None]:
    """Change a field of all samples; of arms, the one with options."""

    def change(content: Any, value: Any) -> None:
        for each in content["samples"]:
            if name != "arm" or each[name] == "--draft ... -k 4":
                each[name] = value

    return change


@pytest.mark.parametrize("value", HARM)
@pytest.mark.parametrize(
    "change",
    [
        _set("target", "name"), _set("machine", "devices", 0), _set("settings", "options"),
        _set("versions", "llamaspec"), _in_samples("prompt"), _in_samples("group"), _in_samples("arm"),
    ],
)  # fmt: skip
def test_no_text_of_a_stranger_is_markup(
    report: Report, tmp_path: Path, change: Callable[[Any, Any], None], value: str
) -> None:
    """Every text is code, or is not there at all."""
    content = json.loads(json.dumps(report.as_json()))
    change(content, value)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(content))
    shown = markdown(read_report(path))
    assert value not in shown
    outside = re.sub("`[^`\n]*`", "", shown)
    n_lines = len(markdown(report).splitlines())
    assert not {*outside} & {*'`<>"\\'}
    assert len(shown.splitlines()) == n_lines
    assert {line.count("|") for line in shown.splitlines()} == {
        0,
        7,
        9,
    }  # beside the tables, in those of answers, of speed


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("format",), 1),
        (("machine", "cores"), "2"),
        (("machine", "memory_bytes"), 10**400),
        (("target", "n_bytes"), 10**400),
        (("target", "n_bytes"), -1),
        (("samples", 1, "seconds"), float("nan")),
        (("samples", 1, "seconds"), "fast"),
        (("samples", 1, "seconds"), 0.0),
        (("samples", 1, "first_seconds"), -1.0),
        (("samples", 1, "seconds"), 1e300),
        (("samples", 1, "n_tokens"), 10**400),
        (("samples", 1, "repeat"), 1),
        (("samples", 1, "group"), "another"),
        (("samples", 1, "arm"), "another"),
        (("samples",), None),
        (("samples",), []),
        (("curve", "widths"), [1, 1, 4]),
    ],
)
def test_impossible_figures_of_a_stranger_are_refused(
    report: Report, tmp_path: Path, place: tuple[str, ...], value: object
) -> None:
    content = json.loads(json.dumps(report.as_json()))
    _set(*place)(content, value)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(content))
    with pytest.raises(LlamaspecError, match="is not a report of bench --share"):
        read_report(path)


@pytest.mark.parametrize("content", ["", "[]", "{", 5000 * "[", " " * (4 << 20) + "{}"])
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(LlamaspecError) as caught:
        read_report(path)
    assert len(str(caught.value)) < 400 + len(str(path))
    assert "\n" not in str(caught.value)


def test_a_picture_shows_the_texts_of_a_stranger_literally(report: Report, tmp_path: Path) -> None:
    named = replace(report, target=replace(report.target, name="a $x_{$ & b"))
    (tmp_path / "a.json").write_text(json.dumps(named.as_json()))
    pytest.importorskip("matplotlib", reason="the dependency group `docs` is not installed")
    draw_benchmarks.draw_results(tmp_path, tmp_path / "pictures")
    drawn = (tmp_path / "pictures" / "a.svg").read_text()
    assert "a $x_{$ &amp; b" in drawn
    assert ">3.00<" in drawn, "speed-up over plain"
    assert "speed-up over plain decoding" in drawn
    draw_benchmarks.draw_results(tmp_path, tmp_path / "again")
    assert (tmp_path / "again" / "a.svg").read_text() == drawn


def test_the_page_is_made_from_the_files(report: Report, tmp_path: Path) -> None:
    page = f"before\n{write_command_docs.BEGIN}old\n{write_command_docs.END}after\n"
    empty = write_command_docs.with_results(page, tmp_path)
    assert re.sub(r"\n+", "\n", empty) == page.replace("old\n", "")
    for name in ("b-m4.json", "a.json"):
        (tmp_path / name).write_text(json.dumps(report.as_json()))
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


def test_the_page_shows_a_picture_of_each_file(beside_the_peer: Report, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(beside_the_peer.as_json()))
    page = f"{write_command_docs.BEGIN}{write_command_docs.END}"
    shown = write_command_docs.with_results(page, tmp_path)
    assert "![Times as fast as llama-server without a draft, by task](benchmarks/a.svg)" in shown


def test_a_picture_with_llama_server_shows_its_best_type(beside_the_peer: Report, tmp_path: Path) -> None:
    """The best of each prompt was drawn, which is known only afterwards."""
    pytest.importorskip("matplotlib", reason="the dependency group `docs` is not installed")
    (tmp_path / "a.json").write_text(json.dumps(beside_the_peer.as_json()))
    draw_benchmarks.draw_results(tmp_path, tmp_path)
    drawn = (tmp_path / "a.svg").read_text()
    assert "whole request, speed-up over llama-server without a draft" in drawn
    assert all(f">{name}<" in drawn for name in ("llamaspec", "llamaspec, plain", f"{MOD} (best type)"))
    assert SIMPLE not in drawn
    assert PEER_BEST not in drawn
