"""What texts must look like, as requests say it: compiled in a thread, and once for the same wish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from starlette.concurrency import run_in_threadpool

from llamaspec.errors import ConstraintError
from llamaspec.pair import Pair
from llamaspec.protocols import Constraint
from llamaspec.serve.faults import RequestError

KEPT = 64  # compiled constraints

Kind = Literal["json_schema", "grammar"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a text must look like."""

    kind: Kind
    text: str  # JSON, or a grammar
    field: str  # of the request that says so


class Constraints:
    """Compiles for a pair, and remembers.

    Parameters
    ----------
    pair : Pair
    """

    def __init__(self, pair: Pair) -> None:
        makers: dict[Kind, Callable[[str], Constraint]] = {
            "json_schema": pair.json_schema,
            "grammar": pair.grammar,
        }
        self._compile = lru_cache(KEPT)(lambda kind, text: makers[kind](text))

    @property
    def n_compiled(self) -> int:
        """How often something had to be compiled."""
        return self._compile.cache_info().misses

    async def compiled(self, shape: Shape) -> Constraint:
        """The constraint of a shape.

        Raises
        ------
        RequestError
            It cannot be used.
        """
        try:
            return await run_in_threadpool(self._compile, shape.kind, shape.text)
        except ConstraintError as error:
            raise RequestError(400, f"{shape.field}: {error}", field=shape.field) from error
