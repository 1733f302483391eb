"""Other libraries with functions of ggml in the same process: each gets its own ones."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hatch_build import find_compiler
from llamaspec.kernels import library
from llamaspec.llama import runtime

SOURCE = Path(__file__).with_name("other_ggml.cpp")


@pytest.fixture(autouse=True)
def _counts() -> Iterator[None]:
    """What other libraries compute is none of our operations."""
    if runtime.kernels().level is None:
        pytest.skip(f"no kernels: {runtime.kernels().reason}")
    before = library.n_products, library.n_missed
    yield
    assert (library.n_products, library.n_missed) == before


def opened(path: Path, *flags: str) -> ctypes.CDLL:
    subprocess.run([*find_compiler(), "-shared", "-fPIC", *flags, SOURCE, "-o", path], check=True)
    return ctypes.CDLL(str(path))


def test_the_functions_of_another_ggml_are_its_own(tmp_path: Path) -> None:
    """Our functions read its tensors as those of llama.cpp, which ended the process."""
    path = tmp_path / "other.so"
    other, name = opened(path), "ggml_tiled_wdata_size"
    found, own, ours = (ctypes.cast(each[name], ctypes.c_void_p).value for each in (
        ctypes.CDLL(None), other, ctypes.CDLL(str(library.path)),
    ))  # fmt: skip
    assert found == ours != own  # so its calls come to us
    path.unlink()
    with ThreadPoolExecutor(8) as workers:
        right = [2 * (n + 1 + 1000 + 5 + 6 + 10) for n in range(200)]
        assert [*workers.map(other.evaluate, range(200))] == right


def test_a_library_without_functions_of_its_own_computes_nothing(tmp_path: Path) -> None:
    other = opened(tmp_path / "calls.so", "-DCALLS_ONLY")
    assert other.evaluate(3) == -1
