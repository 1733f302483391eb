"""The package that people install has what the source tree has."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from command import environment
from patience import PATIENCE

ROOT = Path(__file__).parent.parent
NAMES = "from llamaspec.catalog import read_catalog; print(*read_catalog().entries)"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, far from the source tree."""
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder / "wheel"), versions=["standard"])
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder)
    return folder


def names(package: Path, folder: Path) -> list[str]:
    """The models that a package found in a folder knows."""
    done = subprocess.run(
        [sys.executable, "-c", NAMES],
        cwd=folder, env=environment({"PYTHONPATH": str(package), "LLAMASPEC_CONFIG": str(folder)}),
        capture_output=True, text=True, check=True, timeout=PATIENCE,
    )  # fmt: skip
    return done.stdout.split()


def test_the_installed_package_finds_the_list_of_models(installed: Path, tmp_path: Path) -> None:
    assert (installed / "llamaspec" / "models.yaml").read_bytes() == (ROOT / "models.yaml").read_bytes()
    assert names(installed, tmp_path) == names(ROOT, tmp_path)
    (installed / "llamaspec" / "models.yaml").write_text("only: {path: x.gguf}")
    assert names(installed, tmp_path) == ["only"]


def test_the_installed_package_has_the_embedded_pair_and_pages(installed: Path) -> None:
    for name in (
        "demo/target.gguf",
        "demo/draft.gguf",
        "cli/timeline.html",
        "serve/page/page.js",
        "serve/page/vendor/markdown-it.umd.min.js",
        "serve/page/vendor/LICENSES",
        "py.typed",
    ):
        assert (installed / "llamaspec" / name).stat().st_size == (ROOT / "llamaspec" / name).stat().st_size
