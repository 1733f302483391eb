"""Durations as Ollama's clients send them."""

from __future__ import annotations

import math

import pytest

from llamaspec.serve.durations import seconds_of


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0), ("0", 0.0), ("0s", 0.0), (5, 5.0), (1.5, 1.5), ("300", 300.0), ("10m", 600.0),
        ("1h30m", 5400.0), ("1.5h", 5400.0), ("250ms", 0.25), (" 2s ", 2.0),
        (1e-7, 1e-7), (1e15, math.inf), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf), (-0.5, math.inf),
        ("9999999999", math.inf), ("999999999999h", math.inf), ("2000000h", 7.2e9),
    ],
)  # fmt: skip
def test_durations(given: float | str, seconds: float) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "m", "1 m", "1d", "--1", "1h-30m", "nan", "1e9", "9" * 40])
def test_no_durations(given: str) -> None:
    with pytest.raises(ValueError, match="10m"):
        seconds_of(given)
