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
    if isinstance(given, str):
        found = _WHOLE.fullmatch(given.strip())
        if found is None:
            raise ValueError("must be a number of seconds, or a duration such as 10m or 1h30m")
        parts = _PART.findall(found[2])
        seconds = sum(float(n) * _UNITS[unit] for n, unit in parts) if parts else float(found[2])
        given = -seconds if found[1] else seconds
    return float(given) if 0 <= given <= _LONGEST else math.inf
