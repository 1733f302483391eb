"""A pair that is not loaded: which files, and how they would be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamaspec.llama.options import ModelOptions


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that is not loaded."""

    path: Path
    options: ModelOptions


@dataclass(frozen=True, slots=True)
class PairFiles:
    """A target and perhaps a draft that are not loaded."""

    target: ModelFile
    draft: ModelFile | None
    stages: tuple[ModelFile, ...] = ()  # the draft's draft, and so on
    ngram: bool = False  # draft tokens are looked up in earlier text
    heads: bool = False  # the target's own prediction heads draft

    @property
    def draft_models(self) -> tuple[ModelFile, ...]:
        """The draft, the draft's draft, and so on."""
        return self.stages if self.draft is None else (self.draft, *self.stages)

    @property
    def drafts(self) -> bool:
        """Whether anything drafts."""
        return self.draft is not None or self.ngram or self.heads
