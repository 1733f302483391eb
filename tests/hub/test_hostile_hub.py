"""A hub that lies, or never ends: nothing is written outside its folder, nothing beyond what it announced."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from huggingface_hub import constants

from hub_server import BIG, Hub, serving
from llamaspec.errors import ModelFileError, printable
from llamaspec.hub import download, transfer
from llamaspec.hub.cache import find_here, folder_of, remove
from llamaspec.hub.download import fetch
from llamaspec.hub.progress import FetchProgress
from llamaspec.hub.remote import RemoteFile
from patience import PATIENCE, until

FILE = RemoteFile("acme/big-GGUF", "big-Q8_0.gguf")


@pytest.fixture
def here(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this process, which asks the hub on this machine."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}{''.join(template[1:])}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "deep" / "hub"))
    monkeypatch.setattr(transfer, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return tmp_path / "deep" / "hub"


@pytest.fixture
def other_server(hub: Hub) -> Iterator[Hub]:
    """Another host with the same files."""
    with serving(Hub(hub.files)) as server:
        yield server


def refused() -> str:
    """The line that a failing fetch ends with."""
    with pytest.raises(ModelFileError) as raised:
        fetch(FILE)
    line = str(raised.value)
    assert line == printable(line)
    return line


def written(tmp_path: Path) -> list[str]:
    """All files, without locks."""
    return [
        str(path.relative_to(tmp_path))
        for path in tmp_path.rglob("*")
        if path.is_file() and ".lock" not in path.name
    ]


@pytest.mark.parametrize("header", ["ETag", "X-Repo-Commit"])
@pytest.mark.parametrize(
    "value",
    [
        "/ABSOLUTE/escaped",
        "../../../escaped",
        "../escaped",
        "..",
        ".",
        "",
        None,
        "a/b",
        "A" * 64,
        "0" * 63,
        "x" * 64,
    ],
)
def test_a_hash_or_a_commit_is_never_a_path(
    hub: Hub, here: Path, tmp_path: Path, header: str, value: str | None
) -> None:
    told = value.replace("/ABSOLUTE", str(tmp_path)) if value is not None else None
    hub.headers = {header: told, **({"X-Linked-Etag": None} if header == "ETag" else {})}
    line = refused()
    assert "the hub gives the " in line
    assert written(tmp_path) == []


@pytest.mark.parametrize("size", [None, "0", "-5", "many", "1" + 400 * "0", "1" + 5000 * "0", "9" * 16])
def test_a_size_that_cannot_be(hub: Hub, here: Path, tmp_path: Path, size: str | None) -> None:
    hub.headers = {"X-Linked-Size": size, "Content-Length": "0" if size is None else None}
    assert "no size that a file can have" in refused()
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "http://[", "//", "/\x7f", "http://a b/", "http://h:99999/"]
)
def test_an_address_that_cannot_be(hub: Hub, here: Path, tmp_path: Path, location: str) -> None:
    hub.elsewhere, hub.headers = hub.url, {"Location": location}
    refused()
    assert written(tmp_path) == []


def test_no_more_than_announced_is_read(hub: Hub, here: Path) -> None:
    """300 MB behind a file of which the announced bytes are right."""
    hub.extra_bytes = 300 << 20
    path = fetch(FILE)
    assert path.read_bytes() == hub.files[BIG]
    assert hub.n_sent < 100 << 20  # what the system buffers between the two


def test_less_announced_than_sent_is_not_the_file(hub: Hub, here: Path, tmp_path: Path) -> None:
    hub.sizes[BIG] = 1000
    assert "arrived damaged" in refused()
    assert written(tmp_path) == []


def test_what_ends_early_again_and_again_ends(hub: Hub, here: Path, tmp_path: Path) -> None:
    hub.sizes[BIG] = len(hub.files[BIG]) + 1
    hub.knows_ranges = False
    assert "of" in refused()
    assert not any("snapshots" in path for path in written(tmp_path))


def test_compressed_content_is_refused(hub: Hub, here: Path, tmp_path: Path) -> None:
    hub.headers = {"Content-Encoding": "gzip"}
    assert "encoded as gzip" in refused()
    assert not any("snapshots" in path for path in written(tmp_path))


@pytest.mark.parametrize("content", [b"<html>sorry</html>" * 100, b"GGUF", b"GGUF<html>" + bytes(100)])
def test_only_a_model_gets_a_name(hub: Hub, here: Path, tmp_path: Path, content: bytes) -> None:
    """With the right size and the right hash of the wrong thing."""
    hub.files[BIG] = content
    assert "big-Q8_0.gguf is no model" in refused()
    assert written(tmp_path) == []


def test_content_that_another_program_left_is_looked_at_too(hub: Hub, here: Path) -> None:
    blob = here / "models--acme--big-GGUF" / "blobs" / hub.tag(BIG)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"<html>")
    assert "is no model" in refused()
    assert find_here(FILE) is None


def test_a_file_that_git_keeps_has_git_s_hash(hub: Hub, here: Path) -> None:
    content = hub.files[BIG]
    header = f"blob {len(content)}\0".encode()
    hub.hashes[BIG] = hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
    assert fetch(FILE).read_bytes() == content
    remove(FILE)
    hub.hashes[BIG] = "0" * 40
    assert "arrived damaged" in refused()


def test_the_list_s_hash_decides_where_there_is_one(hub: Hub, here: Path) -> None:
    content = hub.files[BIG]
    header = f"blob {len(content)}\0".encode()
    hub.hashes[BIG] = hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
    with pytest.raises(ModelFileError, match="arrived damaged"):
        fetch(RemoteFile(FILE.repo, FILE.file, sha256=64 * "0"))
    fetch(RemoteFile(FILE.repo, FILE.file, sha256=hashlib.sha256(content).hexdigest()))


def test_nothing_is_fetched_while_another_process_fetches_it(
    hub: Hub, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = here / ".locks" / "models--acme--big-GGUF" / f"{hub.tag(BIG)}.lock"
    path.parent.mkdir(parents=True)
    waits = Event()

    class Told(FileLock):
        def acquire(self, *arguments: Any, **named: Any) -> Any:
            if Path(self.lock_file) == path:
                waits.set()
            return super().acquire(*arguments, **named)

    monkeypatch.setattr(download, "FileLock", Told)
    thread = Thread(target=fetch, args=(FILE,))
    with FileLock(path):
        thread.start()
        until(lambda: waits.is_set() or not thread.is_alive())
        assert (hub.n_requests, hub.n_sent) == (1, 0)  # it has asked what the file is
    thread.join(PATIENCE)
    assert find_here(FILE) is not None
    assert hub.n_sent == len(hub.files[BIG])


def test_what_has_arrived_needs_no_room_again(hub: Hub, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = hub.files[BIG]
    partial = folder_of(FILE) / "blobs" / f"{hub.tag(BIG)}.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(content[:1000])

    def leave(n_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=n_bytes))

    leave(len(content) - 1001)
    assert "make room" in refused()
    leave(len(content) - 1000)
    assert fetch(FILE).read_bytes() == content


def test_parts_of_different_states_are_not_mixed(hub: Hub, here: Path, split_files: list[Path]) -> None:
    file = RemoteFile("acme/split-GGUF", split_files[0].name)
    hub.next_commits = ["a" * 40, "b" * 40]
    with pytest.raises(ModelFileError, match="changes on the hub"):
        fetch(file)


def test_another_range_than_was_asked_for(hub: Hub, here: Path, tmp_path: Path) -> None:
    partial = folder_of(FILE) / "blobs" / f"{hub.tag(BIG)}.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(hub.files[BIG][:100])
    hub.headers = {"Content-Range": f"bytes 0-99/{len(hub.files[BIG])}"}
    assert "another part" in refused()
    assert partial.read_bytes() == hub.files[BIG][:100]


@pytest.mark.parametrize(
    "listing",
    [
        b'[{"path": "big-Q8_0.gguf"}' + b" " * (9 << 20) + b"]",
        b"[" * 100_000,
        b"{}",
        b'[{"path": 3}]',
        b"\xff",
    ],
)
def test_a_list_of_files_that_is_none(hub: Hub, here: Path, listing: bytes) -> None:
    hub.listing = listing
    with pytest.raises(ModelFileError, match=r"has no file big-Q8_1.gguf; look at the files on its page"):
        fetch(RemoteFile(FILE.repo, "big-Q8_1.gguf"))


def test_names_in_a_list_of_files_are_escaped(hub: Hub, here: Path) -> None:
    hub.listing = b'[{"path": "big-Q8_\\u001b[31m0.gguf"}]'
    with pytest.raises(ModelFileError) as raised:
        fetch(RemoteFile(FILE.repo, "big-Q8_1.gguf"))
    assert r"did you mean big-Q8_\x1b[31m0.gguf" in str(raised.value)


# The token


def test_the_token_goes_to_its_own_hub_only(hub: Hub, here: Path, other_server: Hub) -> None:
    hub.elsewhere = other_server.url
    assert fetch(FILE).read_bytes() == hub.files[BIG]
    assert set(hub.authorizations) == {"Bearer hf_secret"}
    assert other_server.authorizations == [None]


def test_the_token_is_not_carried_along_a_redirect_of_the_content(
    hub: Hub, here: Path, other_server: Hub
) -> None:
    """The hub says that it has the content itself, and then points elsewhere."""
    hub.elsewhere_with_content = other_server.url
    assert fetch(FILE).read_bytes() == hub.files[BIG]
    assert set(hub.authorizations) == {"Bearer hf_secret"}
    assert other_server.authorizations == [None]


def test_the_token_stays_where_it_is_not_to_be_sent_unasked(
    hub: Hub, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    fetch(FILE)
    assert set(hub.authorizations) == {None}


# Links in the cache


def test_nothing_is_written_or_deleted_through_links(hub: Hub, here: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / "victim"
    victim.write_bytes(b"mine")
    folder = folder_of(FILE)
    (folder / "blobs").mkdir(parents=True)
    partial = folder / "blobs" / f"{hub.tag(BIG)}.partial"
    partial.symlink_to(victim)
    refused()
    assert victim.read_bytes() == b"mine"
    partial.unlink()
    fetch(FILE)
    (link,) = (folder / "snapshots").rglob("*.gguf")
    link.unlink()
    link.symlink_to(victim)
    assert remove(FILE) == 0
    assert victim.read_bytes() == b"mine"
    (folder / "snapshots").mkdir(parents=True)
    (outside / "commit").mkdir()
    (outside / "commit" / FILE.file).write_bytes(b"mine")
    (folder / "snapshots" / "state").symlink_to(outside / "commit")
    with pytest.raises(ModelFileError, match="leads out of"):
        remove(FILE)
    assert (outside / "commit" / FILE.file).read_bytes() == b"mine"


# What is told, and what the library finds


def test_the_progress_is_told_and_nothing_is_printed(
    hub: Hub, here: Path, split_files: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[FetchProgress] = []
    file = RemoteFile("acme/split-GGUF", split_files[0].name)
    fetch(file, told.append)
    total = sum(path.stat().st_size for path in split_files)
    fetched = [progress for progress in told if progress.activity == "fetching"]
    assert {progress.total_bytes for progress in fetched} == {total}
    assert [progress.done_bytes for progress in fetched] == sorted(p.done_bytes for p in fetched)
    assert (fetched[0].done_bytes, fetched[-1].done_bytes) == (0, total)
    checked = [p.total_bytes for p in told if p.activity == "checking" and p.done_bytes == p.total_bytes]
    assert checked == [path.stat().st_size for path in split_files]
    assert {progress.file for progress in told} == {file}
    assert capfd.readouterr() == ("", "")


def test_other_programs_find_what_was_fetched(hub: Hub, here: Path) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir

    path = fetch(FILE)
    found = hf_hub_download(FILE.repo, FILE.file, cache_dir=here, local_files_only=True)
    assert Path(found) == path
    (repo,) = scan_cache_dir(here).repos
    assert (repo.repo_id, repo.size_on_disk) == (FILE.repo, len(hub.files[BIG]))


def test_a_disk_without_links_keeps_the_file_itself(
    hub: Hub, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    path = fetch(FILE)
    assert not path.is_symlink()
    assert path.read_bytes() == hub.files[BIG]
    assert find_here(FILE) == path
    assert remove(FILE) == len(hub.files[BIG])
    assert not folder_of(FILE).exists()


def test_a_server_without_ranges_begins_anew(hub: Hub, here: Path) -> None:
    hub.knows_ranges = False
    partial = folder_of(FILE) / "blobs" / f"{hub.tag(BIG)}.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"something else")
    assert fetch(FILE).read_bytes() == hub.files[BIG]


# Why the library's own function does not do: whatever passes here is what it lacks


@pytest.mark.parametrize("lie", ["hash", "tag", "size"])
def test_the_library_s_own_download_believes_the_hub(hub: Hub, here: Path, tmp_path: Path, lie: str) -> None:
    from huggingface_hub import hf_hub_download

    if lie == "hash":
        hub.hashes[BIG] = "0" * 64
        path = hf_hub_download(FILE.repo, FILE.file, cache_dir=here, endpoint=hub.url)
        assert Path(path).read_bytes() == hub.files[BIG]  # whose hash is another
    elif lie == "tag":
        hub.hashes[BIG] = str(tmp_path / "escaped")
        hf_hub_download(FILE.repo, FILE.file, cache_dir=here, endpoint=hub.url)
        assert (tmp_path / "escaped").exists()
    else:
        hub.sizes[BIG], hub.extra_bytes = 100_000, 100 << 20
        with pytest.raises(OSError, match="should be of size 100000"):
            hf_hub_download(FILE.repo, FILE.file, cache_dir=here, endpoint=hub.url)
        assert hub.n_sent >= 100 << 20  # it read to the end


def test_what_is_too_large_for_a_plain_download(
    hub: Hub, here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(hub.files[BIG]) - 1)
    assert refused().endswith("it is found here: hf download acme/big-GGUF big-Q8_0.gguf")
    assert written(tmp_path) == []
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(hub.files[BIG]))
    assert fetch(FILE).is_file()
