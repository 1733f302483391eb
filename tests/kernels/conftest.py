"""A library that stands in for the kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hatch_build import FOLDER, LIBRARY, NotBuiltError, build

STAND_IN = Path(__file__).with_name("stand_in.cpp")


def write_stand_in(root: Path) -> Path:
    """Write a checkout whose only source is the stand-in; return it."""
    (root / FOLDER).mkdir(parents=True)
    shutil.copy(STAND_IN, root / FOLDER / "hooks.cpp")
    return root


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, which llama.cpp does not call."""
    return _built(tmp_path_factory.mktemp("stand-in"))


@pytest.fixture(scope="session")
def called_stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, which llama.cpp calls for every product; only for other processes."""
    return _built(tmp_path_factory.mktemp("called"), "-DTAKES_PRODUCTS")


def _built(root: Path, *flags: str) -> Path:
    try:
        build(write_stand_in(root), flags=flags)
    except NotBuiltError as reason:
        pytest.skip(str(reason))
    return root / LIBRARY
