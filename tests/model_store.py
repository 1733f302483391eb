"""Tiny model files, each written once per test run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from llamaspec import LlamaModel, demo_draft, demo_target
from tiny_hidden import DraftRecipe, write_draft
from tiny_models import EMBEDDER_WRITERS, HEAD_WRITERS, WRITERS, Recipe

OpenModel = Callable[..., LlamaModel]  # (kind, recipe, **options), see the fixture `opened`


@dataclass
class ModelStore:
    """Writes a model at its first use."""

    folder: Path
    _written: dict[tuple[str, Recipe] | DraftRecipe, Path] = field(default_factory=dict)

    def path(self, kind: str = "llama", recipe: Recipe | None = None) -> Path:
        """Return the file of a recipe."""
        key = (kind, recipe or Recipe())
        if key not in self._written:
            path = self.folder / f"{len(self._written)}-{kind}.gguf"
            self._written[key] = (WRITERS | HEAD_WRITERS | EMBEDDER_WRITERS)[kind](path, key[1])
        return self._written[key]

    def draft(self, recipe: DraftRecipe) -> Path:
        """Return the file of a draft that reads hidden rows."""
        if recipe not in self._written:
            path = self.folder / f"{len(self._written)}-{recipe.kind}.gguf"
            self._written[recipe] = write_draft(path, recipe)
        return self._written[recipe]


def demo_pair() -> tuple[Path, Path] | None:
    """Return the files of the embedded pair, or None if it has not been trained yet."""
    paths = demo_target(), demo_draft()
    return paths if all(path.exists() for path in paths) else None
