"""Drafts that were made on this machine: where they lie, and which target each was made for.

The file of a made draft names its target in its metadata. It lies beside the target, or in the cache folder
where the target is the hub's. Knows not how drafts are made.
"""

from __future__ import annotations

import hashlib
import re
from glob import escape
from pathlib import Path

from llamaspec.files import cache_folder, read_beginning
from llamaspec.llama.gguf_tensors import read_tensors

DRAFT_FOR = "llamaspec.draft_for"  # metadata: the identity of the target
HASHED_BYTES = 1 << 20  # of the beginning of a file: its metadata
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def identity(target: Path) -> str:
    """What tells a target from others, wherever it lies.

    Raises
    ------
    OSError
        It cannot be read.
    """
    key = hashlib.sha256(str(target.stat().st_size).encode())
    key.update(read_beginning(target, HASHED_BYTES))
    return key.hexdigest()[:32]


def made_path(target: Path, label: str) -> Path:
    """Where a draft for this target belongs."""
    in_hub = any(part.startswith("models--") for part in target.absolute().parts)
    folder = cache_folder() / "drafts" if in_hub else target.parent
    return folder / f"{_stem(target)}.draft-{label}.gguf"


def made_drafts(target: Path) -> list[Path]:
    """The drafts that were made for this target, the newest first."""
    pattern = f"{escape(_stem(target))}.draft-*.gguf"
    try:
        found = [path for folder in _folders(target) for path in folder.glob(pattern) if path.is_file()]
        if not found:
            return []
        wanted = identity(target)
        fitting = [path for path in found if read_tensors(path).texts.get(DRAFT_FOR) == wanted]
        return sorted(fitting, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    except (OSError, ValueError):  # ValueError: no path has such a name
        return []


def _folders(target: Path) -> set[Path]:
    return {target.parent.absolute(), (cache_folder() / "drafts").absolute()}


def _stem(target: Path) -> str:
    return _PART.sub("", target.stem)
