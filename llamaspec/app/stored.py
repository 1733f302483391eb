"""Which files of the hub are on this machine: in the folders of huggingface-hub, CACHE/models--owner--name/.

There `snapshots/COMMIT/FILE` links to `blobs/HASH`. Looks at folders only. huggingface-hub's own look-up
knows only the newest snapshot: a file would be lost when another one is fetched after the repository changed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from llamaspec.app.catalog import RemoteFile

PARTIAL = ".partial"  # after the name of a blob that is not whole


def folder_of(file: RemoteFile) -> Path:
    """Where a repository's files lie (HF_HOME, HF_HUB_CACHE)."""
    from huggingface_hub import constants  # takes a while, and most models are files

    return Path(constants.HF_HUB_CACHE) / f"models--{file.repo.replace('/', '--')}"


def find_here(file: RemoteFile) -> Path | None:
    """The file on this machine, its first part if it was split; None unless all parts are here together."""
    for snapshot in _snapshots(folder_of(file)):
        if all((snapshot / part).is_file() for part in file.parts):
            return snapshot / file.parts[0]
    return None


def partial_bytes(file: RemoteFile) -> int:
    """Bytes that arrived of files in the repository that are not whole yet."""
    return sum(path.stat().st_size for path in (folder_of(file) / "blobs").glob(f"*{PARTIAL}"))


def remove(file: RemoteFile) -> int:
    """Delete a file and its parts from this machine; answers how many bytes that freed.

    Content that another name leads to stays.
    """
    folder = folder_of(file)
    freed = partial_bytes(file)
    for partial in (folder / "blobs").glob(f"*{PARTIAL}"):
        partial.unlink()
    for snapshot in _snapshots(folder):
        freed += sum(_remove_link(folder, snapshot / part) for part in file.parts)
    if folder.exists() and not any(path.is_file() for path in (folder / "snapshots").rglob("*")):
        shutil.rmtree(folder)
    return freed


def _snapshots(folder: Path) -> list[Path]:
    """States of a repository: the main branch's, then the newest."""
    try:
        main = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        main = ""
    states = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    return sorted(states, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)


def _remove_link(folder: Path, link: Path) -> int:
    if not link.is_file():
        return 0
    n_bytes = link.stat().st_size
    content = _content_of(link)
    link.unlink()
    others = (path for path in (folder / "snapshots").rglob("*") if path.is_symlink())
    if content != link:
        if any(_content_of(path) == content for path in others):
            return 0
        content.unlink(missing_ok=True)
    return n_bytes


def _content_of(link: Path) -> Path:
    """One step only: a blob may itself lead to a store that other programs share."""
    return Path(os.path.normpath(link.parent / link.readlink())) if link.is_symlink() else link
