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


@pytest.fixture
def target(target_file: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return Path(shutil.copy(target_file, folder / "target.gguf"))


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stand for the module that needs torch."""
    module: Any = ModuleType("llamaspec.draft_making.distil")
    module.Distillation, module.distil_draft = lambda *wish: wish, None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--text", "none.txt"], "cannot read the text none.txt"),
        (["--output", "."], "is a folder"),
        (["--output", __file__], "exists; name another file with --output, or --force"),
    ],
)
def test_what_cannot_be_is_one_line(
    target: Path, training: ModuleType, arguments: list[str | Path], part: str
) -> None:
    if "--text" not in arguments:
        arguments = [*arguments, "--text", __file__]
    assert part in said(invoke("draft", "distil", target, *arguments))


def test_no_command_replaces_a_file_that_it_reads(target: Path, training: ModuleType, tmp_path: Path) -> None:
    """`draft distil big.gguf --output big.gguf --force` used to overwrite the target."""
    text, link = tmp_path / "text.txt", tmp_path / "link.gguf"
    text.write_text("some text")
    link.symlink_to(target)
    before = target.read_bytes()
    for output in (target, link, text):
        answer = invoke("draft", "distil", target, "--text", text, "--output", output, "--force")
        assert f"{output} is an input of this command; name another file with --output" in said(answer)
    assert (target.read_bytes(), text.read_text()) == (before, "some text")


def test_without_torch_the_remedy_is_said(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "llamaspec.draft_making.distil"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'llamaspec[train]'" in said(invoke("draft", "distil", target, "--text", __file__))


def test_what_a_distilled_draft_is_worth(
    target: Path, training: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    monkeypatch.setattr(training, "distil_draft", copy)
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
