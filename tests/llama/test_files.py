"""Files that are not whole, generating models: one clear error each, and never the end of the process."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from command import Answer, python
from forward_requests import request
from llamaspec import (
    LlamaModel,
    MemoryFullError,
    ModelFileError,
    ModelOptions,
    demo_target,
    open_pair,
)
from llamaspec.llama.gguf_file import check_gguf
from model_store import ModelStore, OpenModel
from tiny_models import Recipe, write_bert, write_llama, write_vocabulary_only

LOAD = """
import sys
from pathlib import Path
import numpy as np
from llamaspec import LlamaModel, ModelOptions
from llamaspec.values import ForwardRequest
for path in sys.argv[1:]:
    with LlamaModel(Path(path), ModelOptions(threads=1)) as model:
        model.forward(ForwardRequest('target', np.arange(2, 18, dtype=np.int32), 4))
"""


def open_files() -> str:
    """The files that this process has open or mapped, from /proc."""
    links = (str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return "\n".join([*links, Path("/proc/self/maps").read_text()])


def replaced(at: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + new + content[at + len(new) :]


def number(value: int) -> bytes:
    return struct.pack("<q", value)


# The header: a magic of 4 bytes, a version of 4, the numbers of tensors and of entries of metadata of 8 each.
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "text": (lambda _: b"# not a model\n" * 100, "is not a GGUF file; convert the model"),
    "empty": (lambda _: b"", "is not a GGUF file"),
    "magic only": (lambda content: content[:4], "is cut short; download it again"),
    "header only": (lambda content: content[:24], "cannot load"),
    "half the metadata": (lambda content: content[:400], "cannot load"),
    "no tensor data": (lambda content: content[: len(content) * 6 // 100], "cannot load"),
    "half the tensor data": (lambda content: content[: len(content) // 2], "cannot load"),
    "last byte missing": (lambda content: content[:-33], "cannot load"),
    "version 99": (replaced(4, struct.pack("<I", 99)), "has GGUF version 99"),
    "other byte order": (replaced(4, struct.pack("<I", 3 << 24)), "has GGUF version"),
    "negative counts": (replaced(8, number(-1)), "has GGUF version"),
    "too many entries": (replaced(16, number(2**40)), "cannot load"),
    "more tensors than there are": (
        lambda content: replaced(8, bytes([content[8] + 1]))(content),
        "cannot load",
    ),
    "key of endless length": (replaced(24, b"\xff" * 7 + b"\x7f"), "cannot load"),
    "other architecture": (
        lambda content: content.replace(number(5) + b"llama", number(5) + b"lamma", 1),
        "unknown model architecture: 'lamma'",
    ),
}


def damaged(store: ModelStore, folder: Path, fault: str) -> Path:
    path = folder / f"{fault}.gguf"
    path.write_bytes(DAMAGE[fault][0](store.path().read_bytes()))
    return path


def check_refused(path: Path, says: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        LlamaModel(path, ModelOptions(threads=1))
    message = str(caught.value)
    assert says in message
    assert str(path) in message
    assert "\n" not in message
    assert "; " in message  # the remedy


@pytest.mark.parametrize("fault", DAMAGE)
def test_damaged_files_are_refused(store: ModelStore, tmp_path: Path, fault: str) -> None:
    check_refused(damaged(store, tmp_path, fault), DAMAGE[fault][1])


def test_files_that_generate_no_text_are_refused(tmp_path: Path) -> None:
    says = "holds only a vocabulary and no weights; give the model itself"
    check_refused(write_vocabulary_only(tmp_path / "vocabulary"), says)
    check_refused(write_bert(tmp_path / "bert"), "generates text")


def test_a_batch_of_several_positions_does_not_end_the_process(store: ModelStore) -> None:
    """llama.cpp's AMX code, compiled by GCC before 11.5, 12.4 or 13.3, crashed with quantized weights if a
    batch had more than one position. Our build leaves AMX out; with other builds, weights are not repacked.
    """
    paths = [store.path("llama", Recipe(dtype=dtype)) for dtype in ("f32", "q8_0", "q4_0")]
    assert python(LOAD, *paths) == Answer(0, "", "")


def test_places_without_a_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cases = {
        tmp_path / "missing.gguf": "no such model file",
        tmp_path: "is a directory; name the .gguf file inside it",
        tmp_path / ("x" * 300): "File name too long",
        Path("/dev/null"): "it is not a regular file",
        Path("/dev/zero"): "it is not a regular file",
        tmp_path / "pipe": "it is not a regular file",  # reading would wait for ever
    }
    for path, says in cases.items():
        with pytest.raises(ModelFileError, match=says):
            LlamaModel(path)


def test_a_path_with_a_null_character() -> None:
    path = "a\0b.gguf"
    for use in (
        lambda: LlamaModel(Path(path)),
        lambda: open_pair(path),
        lambda: open_pair(Path(path), "auto"),
        lambda: open_pair(demo_target(), path),
        lambda: open_pair(demo_target(), path.removesuffix(".gguf")),
        lambda: open_pair(path, "mtp"),
    ):
        with pytest.raises(ModelFileError, match=r"no file has the path a\\x00b"):
            use()


@pytest.fixture
def linked(split_files: list[Path], tmp_path: Path) -> Path:
    """Links with the names of parts to files with other names; returns the path of the first."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for n, part in enumerate(split_files):
        blob = tmp_path / "blobs" / f"{n:064x}"
        blob.write_bytes(part.read_bytes())
        (tmp_path / "snapshot" / part.name).symlink_to(Path("../blobs") / blob.name)
    return tmp_path / "snapshot" / split_files[0].name


def test_parts_are_found_by_the_names_of_links(linked: Path, split_files: list[Path]) -> None:
    with LlamaModel(linked, ModelOptions(threads=1)) as model:
        assert model.vocabulary_size == 288
    second = linked.with_name(split_files[1].name)
    with pytest.raises(ModelFileError, match=rf"{second} is part 2 of 3 of a model; name {linked}$"):
        LlamaModel(second)


@pytest.mark.parametrize(("given", "missing"), [(1, 0), (0, 2), (0, 1), (2, 1)])
def test_a_part_that_is_missing_is_named(
    linked: Path, split_files: list[Path], given: int, missing: int
) -> None:
    names = [part.name for part in split_files]
    linked.with_name(names[missing]).unlink()
    reason = rf"is part {given + 1} of 3 of a model; {names[missing]} is missing"
    with pytest.raises(ModelFileError, match=reason):
        LlamaModel(linked.with_name(names[given]))


def test_a_link_to_a_part_under_another_name(linked: Path, split_files: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    for name in (split_files[0].name, split_files[1].name):
        other.unlink(missing_ok=True)
        other.symlink_to(linked.with_name(name))
        with pytest.raises(ModelFileError, match=r"other\.gguf is a renamed part of a model"):
            LlamaModel(other)
    named = tmp_path / "named-00001-of-00003.gguf"
    named.symlink_to(linked)
    with pytest.raises(ModelFileError, match=r"named-00002-of-00003\.gguf is missing"):
        LlamaModel(named)


def test_a_whole_model_may_have_the_name_of_a_part(store: ModelStore, tmp_path: Path) -> None:
    path = tmp_path / "merged-00001-of-00002.gguf"
    path.write_bytes(store.path().read_bytes())
    LlamaModel(path, ModelOptions(threads=1)).close()


def test_an_unreadable_file(store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is simulated: tests may run as a user who can read everything."""
    path = write_llama(tmp_path / "secret.gguf")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(ModelFileError, match=r"cannot read .*secret\.gguf: Permission denied; "):
        check_gguf(path)


def test_names_that_are_not_ascii(store: ModelStore, tmp_path: Path) -> None:
    path = tmp_path / "Modèle – 模型.gguf"
    path.write_bytes(store.path().read_bytes())
    with LlamaModel(path, ModelOptions(threads=1)) as model:
        assert model.vocabulary_size == 288


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("n_ctx", [10**9, 2**31 - 1])
def test_a_context_larger_than_the_machine(
    store: ModelStore, opened: OpenModel, kind: str, n_ctx: int
) -> None:
    with pytest.raises(MemoryFullError, match=r"context of \d+ tokens.*; use a smaller context"):
        opened(kind, n_ctx=n_ctx)
    assert opened(kind).forward(request(7)).shape == (1, 288)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_no_file_stays_open(store: ModelStore, tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"  # other tests may have the shared file open
    path.write_bytes(store.path().read_bytes())
    model = LlamaModel(path, ModelOptions(threads=1))
    model.close()
    model.close()
    refused = [damaged(store, tmp_path, fault) for fault in ("half the tensor data", "other architecture")]
    refused.append(write_bert(tmp_path / "bert"))
    for each in refused:
        with pytest.raises(ModelFileError):
            LlamaModel(each, ModelOptions(threads=1))
    with pytest.raises(MemoryFullError):
        LlamaModel(path, ModelOptions(threads=1, n_ctx=2**31 - 1))
    still_open = open_files()
    assert not [name for name in (path, *refused) if str(name) in still_open]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_an_open_model_holds_its_file(opened: OpenModel) -> None:
    """Otherwise the test before this one could not fail."""
    assert str(opened().path) in open_files()


class StoppedError(Exception):
    """An exception that a callback raises."""


@pytest.mark.parametrize("error", [StoppedError, KeyboardInterrupt])
def test_an_error_in_the_progress_callback_ends_the_loading(
    store: ModelStore, error: type[BaseException]
) -> None:
    """ctypes would print and ignore it."""

    def on_load(_fraction: float) -> None:
        raise error

    with pytest.raises(error):
        LlamaModel(store.path(), ModelOptions(threads=1), on_load)


def test_ctrl_c_while_loading(store: ModelStore, capfd: pytest.CaptureFixture[str]) -> None:
    """The signal arrives inside llama.cpp; Python handles it in the callback."""
    with pytest.raises(KeyboardInterrupt):
        LlamaModel(
            store.path(), ModelOptions(threads=1), lambda _fraction: signal.raise_signal(signal.SIGINT)
        )
    assert capfd.readouterr().err == ""
    with LlamaModel(store.path(), ModelOptions(threads=1)) as model:
        assert model.context_size == 512


def test_progress_is_reported(store: ModelStore) -> None:
    fractions: list[float] = []
    with LlamaModel(store.path(), ModelOptions(threads=1), fractions.append):
        pass
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
