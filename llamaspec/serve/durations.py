"""Durations as Ollama writes them: seconds, or Go's `1h30m`; below zero means forever."""

from __future__ import annotations

import math
import re

_LONGEST = 2**63 * 1e-9  # of a duration in Go, in seconds
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,9})?)(ns|us|µs|ms|s|m|h)")
_WHOLE = re.compile(rf"(-?)((?:{_PART.pattern})+|[0-9]{{1,12}}(?:\.[0-9]{{0,9}})?)")


def seconds_of(given: float | str) -> float:
    """Return the seconds of a duration; infinity if it is below zero or above Go's 292 years.

    Raises ValueError if it is none.

    Examples
    --------
    >>> seconds_of("1h30m"), seconds_of(5), seconds_of("-1")
    (5400.0, 5.0, inf)
    """
    seconds = _read(given) if isinstance(given, str) else float(given)
    if math.isnan(seconds):
        raise ValueError("must be a number of seconds, or a duration such as 10m or 1h30m")
    return seconds if 0 <= seconds <= _LONGEST else math.inf


def _read(text: str) -> float:
    """Return the seconds that a text names; NaN if it names none."""
    found = _WHOLE.fullmatch(text.strip())
    if found is None:
        return math.nan
    parts = _PART.findall(found[2])
    seconds = sum(float(n) * _UNITS[unit] for n, unit in parts) if parts else float(found[2])
    return -seconds if found[1] else seconds
