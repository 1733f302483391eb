"""Which files of the hub are on this machine: in the folders of huggingface-hub, CACHE/models--owner--name/.

There `snapshots/COMMIT/FILE` links to `blobs/HASH`. Looks at folders only. huggingface-hub's own look-up
knows only the newest snapshot: a file would be lost when another one is fetched after the repository changed.
Nothing outside a repository's folder is deleted, whatever its links say.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from llamaspec.files import read_file
from llamaspec.hub.remote import RemoteFile, below, is_plain

PARTIAL = ".partial"  # after the name of a blob that is not whole
_MAX_COMMIT_BYTES = 100


def folder_of(file: RemoteFile) -> Path:
    """Where the files of its repository lie (HF_HOME, HF_HUB_CACHE)."""
    return _folder(file.repo)


def models_here(repo: str) -> list[str]:
    """The model files of a repository that are here, by their paths in it."""
    states = [state for state in (_folder(repo) / "snapshots").glob("*") if state.is_dir()]
    found = (path.relative_to(state) for state in states for path in state.rglob("*.gguf") if path.is_file())
    return sorted({path.as_posix() for path in found})


def _folder(repo: str) -> Path:
    from huggingface_hub import constants  # takes a while, and most models are files

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def find_here(file: RemoteFile) -> Path | None:
    """The file on this machine, its first part if it was split; None unless all parts are here together."""
    for paths in _links(file):
        if all(path.is_file() for path in paths):
            return paths[0]
    return None


def partial_bytes(file: RemoteFile) -> int:
    """Bytes that arrived of files in the repository that are not whole yet."""
    return sum(path.lstat().st_size for path in _partials(file))


def remove(file: RemoteFile) -> int:
    """Delete a file and its parts from this machine; answers how many bytes that freed.

    Content that another name leads to stays.
    """
    folder = folder_of(file)
    freed = partial_bytes(file)
    for partial in _partials(file):
        partial.unlink()
    freed += sum(_remove_link(folder, link) for links in _links(file) for link in links)
    if folder.exists() and not any(path.is_file() for path in (folder / "snapshots").rglob("*")):
        shutil.rmtree(folder)
    return freed


def _partials(file: RemoteFile) -> list[Path]:
    folder = folder_of(file)
    names = [path.name for path in (folder / "blobs").glob(f"*{PARTIAL}")]
    return [below(folder, f"blobs/{name}") for name in names if is_plain(name)]


def _links(file: RemoteFile) -> list[list[Path]]:
    """Where the parts lie, if they do: in the main branch's state of the repository, then in the newest."""
    folder = folder_of(file)
    try:
        main = read_file(folder / "refs" / "main", _MAX_COMMIT_BYTES).decode(errors="replace").strip()
    except OSError:
        main = ""
    states = [path for path in (folder / "snapshots").glob("*") if path.is_dir() and is_plain(path.name)]
    states.sort(key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)
    return [[below(folder, f"snapshots/{state.name}/{part}") for part in file.parts] for state in states]


def _remove_link(folder: Path, link: Path) -> int:
    if not link.is_file():
        return 0
    n_bytes = link.stat().st_size
    content = _content_of(link)
    link.unlink()
    if content == link:
        return n_bytes
    others = (path for path in (folder / "snapshots").rglob("*") if path.is_symlink())
    if content.parent != folder / "blobs" or any(_content_of(path) == content for path in others):
        return 0
    below(folder, f"blobs/{content.name}").unlink(missing_ok=True)
    return n_bytes


def _content_of(link: Path) -> Path:
    """One step only: a blob may itself lead to a store that other programs share."""
    return Path(os.path.normpath(link.parent / link.readlink())) if link.is_symlink() else link
