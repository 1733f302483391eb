"""Options that a list of models gives for one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llamaspec.files import expanded
from llamaspec.sampling.filters import Sampling

# The value of each sampling option that turns it off; None = none does.
_OFF = {
    "temperature": None, "top_k": 0, "top_p": 1, "min_p": 0, "repeat_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Defaults:
    """Options of a model that hold where a command or a request gives none; ValueError if one is invalid.

    They have the names and the meaning of the commands' options. `n_ctx` is the context of one sequence.
    """

    n_ctx: int | None = None
    chat_template: str | None = None  # the path of a file
    temperature: float | None = None
    top_k: int | None = None  # 0 = off
    top_p: float | None = None  # 1 = off
    min_p: float | None = None  # 0 = off
    repeat_penalty: float | None = None  # 1 = off
    presence_penalty: float | None = None  # 0 = off
    frequency_penalty: float | None = None  # 0 = off
    reasoning_budget: int | None = None  # tokens

    def __post_init__(self) -> None:
        if not 2 <= (self.n_ctx or 2) < 1 << 31:
            raise ValueError(f"n_ctx must be from 2 to {(1 << 31) - 1}, got {self.n_ctx}")
        if (self.reasoning_budget or 0) < 0:
            raise ValueError(f"reasoning_budget must be >= 0, got {self.reasoning_budget}")
        _ = self.sampling

    @property
    def sampling(self) -> Sampling:
        """The sampling, with llama.cpp's values for what is not given."""
        default = Sampling()
        given: dict[str, Any] = {}
        for name, off in _OFF.items():
            value = getattr(self, name)
            given[name] = getattr(default, name) if value is None else None if value == off else value
        return Sampling(**given)

    @property
    def given(self) -> Mapping[str, int | float | str]:
        """What is given, by name."""
        found = {key: value for key, value in asdict(self).items() if value is not None}
        if self.chat_template is not None:
            found["chat_template"] = str(expanded(self.chat_template))
        return found
