"""How values of options are read that click has no type for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click


class DraftName(click.ParamType):  # type: ignore[type-arg]
    """A draft; the environment names one alone, whose path may have spaces."""

    name = "text"

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """The one name."""
        return (rv,)


class Separated(click.ParamType):  # type: ignore[type-arg]
    """Values with commas between them; a ValueError of who reads one is told as a wrong value."""

    def __init__(self, name: str, read: Callable[[str], tuple[Any, ...]]) -> None:
        self.name, self._read = name, read

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """The values."""
        try:
            return value if isinstance(value, tuple) else self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _devices(text: str) -> tuple[str, ...]:
    """Names, or "none"."""
    return () if text == "none" else tuple(name.strip() for name in text.split(","))


def _shares(text: str) -> tuple[float, ...]:
    """Numbers; slashes do as well, as llama.cpp reads them."""
    try:
        return tuple(float(share) for share in text.replace("/", ",").split(","))
    except ValueError:
        raise ValueError(f"{text!r} are no numbers with commas between them, such as 3,1") from None


DEVICE_NAMES = Separated("devices", _devices)
SHARES = Separated("shares", _shares)
