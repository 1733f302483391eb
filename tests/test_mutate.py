"""The breaks that the mutation script makes: each is one, and none is in what does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutate import mutants, sample

NOTHING = '''
"""Says what it is."""
from x import y
@decorated(1)
def f(a: int = 3) -> int:
    """Says more."""
    raise ValueError(f"{a + 1}")
'''


def broken(source: str) -> list[str]:
    return [mutant.source for mutant in mutants(source)]


def test_what_does_nothing_is_left_alone() -> None:
    assert broken(NOTHING) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("assert a < b <= c", ["assert a <= b <= c", "assert a < b < c"]),
        ("x = a + b", ["pass", "x = a - b"]),
        ("x += 1", ["x -= 1", "pass", "x += 2"]),
        ("assert a and True", ["assert a or True", "assert a and False"]),
        ("assert not a", ["assert a"]),
        ("f(a, attempt=b)", ["pass", "f(a)"]),
        ("if a:\n    f()", ["if not a:\n    f()", "if a:\n    pass"]),
        ("def f():\n    return a", ["def f():\n    return None"]),
        ("def f():\n    return None", []),
        ("x: float = 0.5", ["x: float = 1.5"]),
    ],
)
def test_each_break_is_one(source: str, expected: list[str]) -> None:
    assert sorted(broken(source)) == sorted(expected)


def test_a_sample_is_of_the_breaks_of_all_files(tmp_path: Path) -> None:
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for path, source in zip(files, ("x = a + b", "assert a < b <= c"), strict=True):
        path.write_text(source)
    every = [(path, mutant) for path in files for mutant in mutants(path.read_text())]
    assert list(sample(files, None, 0)) == list(sample(files, 4, 0)) == every
    samples = [list(sample(files, 3, seed)) for seed in (1, 1, 2, 3, 4, 5)]
    assert samples[0] == samples[1]
    assert all(len(found) == 3 and set(found) < set(every) for found in samples)
    assert set().union(*samples) == set(every)
