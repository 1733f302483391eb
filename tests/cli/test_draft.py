"""`llamaspec draft` through its real entry point."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from command import invoke, said
from llamaspec.draft_making.measuring import TrialSettings
from llamaspec.files import file_identity
from llamaspec.llama.quantize import write_copy
from llamaspec.measure.turns import Spread
from llamaspec.plan import DRAFT_FOR, find_draft, made_path
from tiny_models import truncated


@pytest.fixture
def target(target_file: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return Path(shutil.copy(target_file, folder / "target.gguf"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--text", "none.txt"], "cannot read the text none.txt"),
        (["--output", "."], "is a folder"),
        (["--output", __file__], "exists; name another file with --output, or --force"),
    ],
)
def test_what_cannot_be_is_one_line(target: Path, arguments: list[str | Path], part: str) -> None:
    for way in ("distil", "trim"):
        if way == "distil" and "--text" not in arguments:
            arguments = [*arguments, "--text", __file__]
        if way == "trim":
            arguments = [*arguments, "--for", target]
        if way != "distil" or _has_torch():
            assert part in said(invoke("draft", way, target, *arguments))


@pytest.mark.parametrize("way", ["distil", "trim"])
def test_no_command_replaces_a_file_that_it_reads(
    target: Path, draft_file: Path, tmp_path: Path, way: str
) -> None:
    """`draft trim small.gguf --output small.gguf --force` used to overwrite the draft."""
    if way == "distil" and not _has_torch():
        pytest.skip("the extra `train` is not installed")
    text, link = tmp_path / "text.txt", tmp_path / "link.gguf"
    text.write_text("some text")
    link.symlink_to(target)
    draft = Path(shutil.copy(draft_file, tmp_path / "small.gguf"))
    models = (draft, "--for", target, "--keep", "272") if way == "trim" else (target,)
    before = target.read_bytes(), draft.read_bytes()
    for output in (target, link, text, *([draft] if way == "trim" else [])):
        answer = invoke("draft", way, *models, "--text", text, "--output", output, "--force")
        assert f"{output} is an input of this command; name another file with --output" in said(answer)
    assert (target.read_bytes(), draft.read_bytes(), text.read_text()) == (*before, "some text")


def _has_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch)


def test_without_torch_the_remedy_is_said(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "llamaspec.draft_making.distil"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'llamaspec[train]'" in said(invoke("draft", "distil", target, "--text", __file__))


def test_what_a_distilled_draft_is_worth(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training only copies, so this needs no torch."""
    asked: list[tuple[object, ...]] = []

    def copy(path: Path, _options: object, texts: object, wish: object, output: Path, *_: object) -> None:
        asked.append((path, texts, wish, output))
        shutil.copy(path, output)

    class Measured:
        def __init__(self, _model: object, wish: TrialSettings) -> None:
            asked.append((wish.texts, wish.sampling.temperature))

        def cost_and_acceptance(self, path: Path) -> tuple[float, float]:
            assert path.read_bytes() == target.read_bytes()
            return 0.25, 0.625

        def speed_up(self, _path: Path) -> Spread:
            return Spread(1.25, 1.5, 2.25)

    module: Any = ModuleType("llamaspec.draft_making.distil")
    module.Distillation, module.distil_draft = lambda *wish: wish, copy
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("llamaspec.cli.draft.Trial", Measured)
    text = target.with_name("text.txt")
    text.write_text("to learn from")
    wishes = ("--minutes", "7", "--layers", "2", "--width", "64", "--temperature", "0.75", "--json")
    found = invoke("draft", "distil", target, "--text", text, "--threads", "1", *wishes).json
    output = made_path(target, "distilled")
    assert asked == [
        (target, (b"to learn from",), (7.0, 2, 64), output),
        ((b"to learn from",), 0.75),
    ]
    measured = {"low": 1.25, "median": 1.5, "high": 2.25}
    assert found == {"path": str(output), "cost_ratio": 0.25, "acceptance": 0.625, "measured": measured}
    assert "--text" in invoke("draft", "distil", target).stderr


def test_auto_finds_a_trimmed_draft(target: Path, draft_file: Path, tmp_path: Path) -> None:
    output = made_path(target, "trim-272-Q8_0")
    trimming = ("draft", "trim", draft_file, "--for", target, "--keep", "272", "--type", "Q8_0")
    found = invoke(*trimming, "--json").json
    assert (found["path"], found["n_tokens"], found["n_tokens_before"]) == (str(output), 272, 288)
    assert set(target.parent.iterdir()) == {target, output}
    assert "exists; name another file with --output, or --force" in invoke(*trimming).stderr
    assert invoke(*trimming, "--force").code == 0
    options = ("--threads", "1", "-p", "def", "-n", "30", "--seed", "3", "--json")
    wanted = ("generate", "--target", target, *options)
    answer = invoke(*wanted, "--draft", "auto", "--draft-length", "3")
    assert answer.json["statistics"]["accepted"] > 0
    assert answer.json["tokens"] == invoke(*wanted, "--no-draft").json["tokens"]
    (tmp_path / "text.txt").write_text("self the " * 9)
    text = ("--keep", "260", "--text", tmp_path / "text.txt")
    answer = invoke("draft", "trim", draft_file, *text, "--output", tmp_path / "small.gguf")
    assert answer.stdout.startswith("kept 260 of 288 tokens, 5.3% of the text; ")
    assert " MB → " in answer.stdout
    assert answer.stdout.endswith(f"wrote {tmp_path / 'small.gguf'}\n")


def test_what_cannot_be_trimmed(target: Path, tmp_path: Path) -> None:
    output = tmp_path / "trimmed.gguf"
    damaged = truncated(target, tmp_path / "damaged.gguf")
    assert "damaged.gguf" in said(invoke("draft", "trim", damaged, "--keep", "272", "-o", output))
    assert "from 258 to 287 with --keep" in said(invoke("draft", "trim", target, "-o", output))
    answer = invoke("draft", "trim", target)
    assert (answer.code, answer.stdout) == (2, "")
    assert "name the target with --for, or the file to write with --output" in answer.stderr
    assert not output.exists()


@pytest.fixture
def with_draft(target: Path) -> Path:
    """Return a target with a draft beside it that was made for it."""
    entries = {DRAFT_FOR: file_identity(target)}
    write_copy(target, made_path(target, "distilled"), entries=entries, threads=1)
    return target


def test_what_was_made_comes_before_what_is_listed(own_list: Path, with_draft: Path) -> None:
    own_list.write_text(f"mine: {{path: {with_draft}, draft: other}}\nother: {{path: {with_draft}}}\n")
    assert find_draft("mine") == str(made_path(with_draft, "distilled"))
    made_path(with_draft, "distilled").unlink()
    assert find_draft("mine") == "other"


def test_the_list_shows_what_was_made(own_list: Path, with_draft: Path) -> None:
    own_list.write_text(f"mine: {{path: {with_draft}}}\n")
    assert "made here" in invoke("models", "list").stdout
    entries = json.loads(invoke("models", "list", "--json").stdout)
    (entry,) = [each for each in entries if each["name"] == "mine"]
    assert entry["made_drafts"] == [str(made_path(with_draft, "distilled"))]
    assert "distilled.gguf" in invoke("models", "show", "mine").stdout
