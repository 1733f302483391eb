"""A pair that is not loaded: which files, and how they would be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from llamaspec.llama.head_files import what_it_reads
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.placement import Placement
from llamaspec.llama.placing import has_gpus, place_models


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
    placement: Placement | None = None  # why layers go where they go; None: nothing was decided

    @property
    def draft_models(self) -> tuple[ModelFile, ...]:
        """The draft, the draft's draft, and so on."""
        return self.stages if self.draft is None else (self.draft, *self.stages)

    @property
    def drafts(self) -> bool:
        """Whether anything drafts."""
        return self.draft is not None or self.ngram or self.heads


def place_files(files: PairFiles) -> PairFiles:
    """The same files, with the layers of each on the devices where they are best.

    Raises
    ------
    PairError
        The draft is a prediction head that cannot be used.
    """
    if not has_gpus():
        return files
    drafts = [model for model in files.draft_models if not what_it_reads(model.path)]
    options = files.target.options if files.draft is None else files.draft.options
    placed = place_models(
        (files.target.path, files.target.options), ([draft.path for draft in drafts], options)
    )
    if placed.placement is None:
        return files

    def with_placement(model: ModelFile) -> ModelFile:
        return replace(model, options=placed.draft) if model in drafts else model

    return replace(
        files,
        target=replace(files.target, options=placed.target),
        draft=None if files.draft is None else with_placement(files.draft),
        stages=tuple(map(with_placement, files.stages)),
        placement=placed.placement,
    )
