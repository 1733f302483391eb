"""The models of a folder, and which of them drafts for which.

Only metadata are read. A model drafts for another one if both have the same tokens and a draft step takes at
most a fifth of the target's time, by the bytes that are read for a token. tests/test_folder.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from llamaspec.files import part_names
from llamaspec.llama.file_facts import FileFacts, file_facts, vocabulary_prints

LARGEST = 1 / 5  # share of the target's bytes; from here on, few drafts are faster
BEST = 1 / 20  # docs/choosing-a-draft.md computes its gains for this share


def model_files(folder: Path) -> list[Path]:
    """Return the models of a folder and the folders in it, without drafts that were made on this machine."""
    return [
        path
        for path in sorted(folder.rglob("*.gguf"))
        if part_names(path.name)[0] == path.name and ".draft-" not in path.name
    ]


def fitting_drafts(paths: Iterable[Path]) -> dict[Path, Path]:
    """Return the draft of each of these models for which another one fits; the same files give the same."""
    models = {path: facts for path in sorted(paths) if (facts := text_facts(path)) is not None}
    found = {}
    for path, target in models.items():
        most = LARGEST * target.token_bytes
        small = ((other, draft) for other, draft in models.items() if 0 < draft.token_bytes <= most)
        fitting = [(other, draft) for other, draft in small if _have_same_tokens(path, other)]
        if fitting:
            found[path] = min(fitting, key=lambda each: (_distance(target, each[1]), each[0]))[0]
    return found


def text_facts(path: Path) -> FileFacts | None:
    """Return the facts of a file that generates text; None for others."""
    try:
        facts = file_facts(path)
    except OSError:
        return None
    return facts if facts.refusal is None else None


def _have_same_tokens(target: Path, draft: Path) -> bool:
    try:
        return bool(vocabulary_prints(target) & vocabulary_prints(draft))
    except OSError:  # a file has just left
        return False


def _distance(target: FileFacts, draft: FileFacts) -> tuple[bool, bool, float]:
    """Return how far a draft is from the best one: of the same generation and family, of the best size."""
    return (
        draft.architecture != target.architecture,
        draft.basename != target.basename,
        abs(math.log(draft.token_bytes / target.token_bytes / BEST)),
    )
