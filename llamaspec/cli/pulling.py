"""Downloads for clients of a server, if `--pull` allows them: only from the lists and from the hub."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

from llamaspec.catalog import find_remote, read_catalog, resolve_model
from llamaspec.errors import FetchError
from llamaspec.hub import RemoteFile, address_of, is_path, repo_folder
from llamaspec.llama.gguf_file import check_gguf
from llamaspec.model_names import PREFIXES
from llamaspec.serve.models import OnPull

POLL_SECONDS = 0.5  # between two reports of progress


def pull(name: str, on_pull: OnPull) -> None:
    """Fetch a model and the draft that is listed for it; ModelFileError if there is no such model."""
    address = _address(name)
    draft = read_catalog().draft_of(address)
    for wanted in (address, *([] if draft is None else [draft])):
        _fetch(wanted, on_pull)


def _address(name: str) -> str:
    """Return the name in our lists, or the address on the hub, that a client means; never a path."""
    if name.lower().startswith(PREFIXES):
        return address_of(name)
    found = None if is_path(name) else read_catalog().meaning(name)
    if found is None or found[0].repo is None:
        raise FetchError("no list has a model of this name; `llamaspec models list` shows the names")
    entry, quantization = found
    return f"{entry.name}:{quantization}".removesuffix(":")


def _fetch(address: str, on_pull: OnPull) -> None:
    """Fetch a model, and report its progress every now and then."""
    file = find_remote(address)
    if file is None:
        return  # a file on this machine
    n_before, n_missing = _n_bytes(file), 0

    def on_fetch(_: RemoteFile, n: int) -> None:
        nonlocal n_missing
        n_missing = n

    fetching = _in_thread(lambda: resolve_model(address, on_fetch))
    while not wait((fetching,), POLL_SECONDS).done:
        on_pull(file.file, min(_n_bytes(file) - n_before, n_missing), n_missing)
    check_gguf(fetching.result())
    on_pull(file.file, n_missing, n_missing)


def _in_thread(fetch: Callable[[], Path]) -> Future[Path]:
    """Fetch in a thread that ends with the process; the next fetch continues from there."""
    fetching = Future[Path]()

    def run() -> None:
        try:
            fetching.set_result(fetch())
        except BaseException as error:  # noqa: BLE001  # raised where the result is read
            fetching.set_exception(error)

    threading.Thread(target=run, name="llamaspec-pull", daemon=True).start()
    return fetching


def _n_bytes(file: RemoteFile) -> int:
    """Return the bytes of a repository on this machine, those of incomplete files included."""
    n_bytes = 0
    for path in (repo_folder(file.repo) / "blobs").glob("*"):
        with suppress(FileNotFoundError):  # it has its final name now
            n_bytes += path.stat().st_size
    return n_bytes
