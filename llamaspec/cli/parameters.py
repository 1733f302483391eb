"""How values of options are read that click has no type for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click


class DraftName(click.ParamType):  # type: ignore[type-arg]
    """A draft; the environment names one alone, whose path may have spaces."""

    name = "text"

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """The one name."""
        return (rv,)


class DeviceNames(click.ParamType):  # type: ignore[type-arg]
    """Names with commas between them, or none."""

    name = "devices"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The names; empty for "none"."""
        if isinstance(value, tuple):
            return value
        return () if value == "none" else tuple(name.strip() for name in value.split(","))


class Shares(click.ParamType):  # type: ignore[type-arg]
    """Numbers with commas or slashes between them, as llama.cpp reads them."""

    name = "shares"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """The numbers."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(share) for share in value.replace("/", ",").split(","))
        except ValueError:
            self.fail(f"{value!r} are no numbers with commas between them, such as 3,1", param, ctx)
