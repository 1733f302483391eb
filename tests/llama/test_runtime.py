"""llama.cpp in this process: exceptions of callbacks, reasons of failures."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llama_cpp import llama_cpp as lib

from forward_requests import request
from llamaspec import EvaluationError, LlamaModel, ModelFileError
from llamaspec.errors import DeviceError, MemoryFullError
from llamaspec.llama import runtime
from model_store import ModelStore, OpenModel
from patience import PATIENCE


def in_a_callback(name: str) -> Any:
    """The argument of the hook when a callback raises KeyError(name)."""
    return SimpleNamespace(exc_value=KeyError(name), err_msg="ignored on calling ctypes callback")


def test_a_processor_that_lacks_instructions_gets_a_line_instead_of_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old := tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu sse4_2 avx fma\n")
    built = SimpleNamespace(
        ggml_cpu_has_avx=lambda: 1,
        ggml_cpu_has_avx2=lambda: 1,
        ggml_cpu_has_f16c=lambda: 1,
        ggml_cpu_has_avx512=lambda: 0,
    )
    missing: Callable[..., list[str]] = runtime.missing_instructions
    assert missing(built, old, "x86_64") == ["f16c", "avx2"]
    assert missing(built, old, "aarch64") == []  # emulated: the file is the host's
    assert missing(built, tmp_path / "none", "x86_64") == []
    assert missing(runtime.loaded("ggml-cpu"), Path("/proc/cpuinfo"), platform.machine()) == []
    monkeypatch.setattr(runtime, "missing_instructions", lambda *_: ["avx2"])
    with pytest.raises(DeviceError, match="processors with avx2, which this one lacks"):
        runtime.start.__wrapped__()


def test_an_exception_of_a_callback_is_raised_after_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other unraisable exceptions go to the usual hook, and after the block all of them do."""
    shown: list[object] = []
    usual = shown.append
    monkeypatch.setattr(sys, "unraisablehook", usual)
    elsewhere = SimpleNamespace(exc_value=KeyError("y"), err_msg="ignored in")
    with pytest.raises(KeyError, match="x"), runtime.raising_callbacks():  # noqa: PT012
        sys.unraisablehook(elsewhere)
        sys.unraisablehook(in_a_callback("x"))
    assert shown == [elsewhere]
    assert sys.unraisablehook is usual


def test_blocks_that_overlap_in_two_threads_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models were loaded at once, and the later one restored the hook of the earlier, which had ended.

    From then on, exceptions of all callbacks were lost.
    """
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    blocks = {name: runtime.raising_callbacks() for name in ("first", "second")}

    def leave(name: str) -> None:
        sys.unraisablehook(in_a_callback(name))
        blocks[name].__exit__(None, None, None)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
        threads = {"first": one, "second": another}
        for name in blocks:
            threads[name].submit(blocks[name].__enter__).result(PATIENCE)
        for name in blocks:
            with pytest.raises(KeyError, match=name):
                threads[name].submit(leave, name).result(PATIENCE)
    assert shown == []
    later = in_a_callback("later")
    sys.unraisablehook(later)
    assert shown == [later]


def test_a_block_inside_another_gets_its_own_exceptions() -> None:
    usual = sys.unraisablehook
    with pytest.raises(KeyError, match="outer"), runtime.raising_callbacks():  # noqa: PT012
        with pytest.raises(KeyError, match="inner"), runtime.raising_callbacks():
            sys.unraisablehook(in_a_callback("inner"))
        sys.unraisablehook(in_a_callback("outer"))
    assert sys.unraisablehook is usual


def _call(function: Callable[[Any], object], argument: object) -> None:
    function(argument)


def test_a_hook_that_is_set_inside_the_block_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a hook often calls the one before it, so ours may be called later, and must not call itself."""
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    for _ in range(2):
        with runtime.raising_callbacks():
            after = sys.unraisablehook = partial(_call, sys.unraisablehook)
        assert sys.unraisablehook is after
    error = in_a_callback("x")
    sys.unraisablehook(error)
    assert shown == [error]


def failing(lines: Sequence[bytes], result: object, elsewhere: Callable[[], object]) -> Callable[..., object]:
    """A function of llama.cpp that fails with these errors, while another thread is in llama.cpp, too."""

    def fails(*_: object) -> object:
        with ThreadPoolExecutor(1) as another:
            for line in lines:
                another.submit(elsewhere).result(PATIENCE)
                runtime.log.callback(4, line, None)
        return result

    return fails


def complain() -> None:
    runtime.log.callback(4, b"an error of another thread\n", None)


def test_a_failure_is_explained_by_its_own_call(opened: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, the reason was the oldest of the last eight errors, even of another failure or thread."""
    model = opened()
    complain()
    lines = [b"the cause\n", *[b"its consequence\n"] * 9]
    monkeypatch.setattr(lib, "llama_decode", failing(lines, -3, complain))
    with pytest.raises(EvaluationError, match=r"\(code -3\): the cause$"):
        model.forward(request(5))


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([b"unable to allocate CPU buffer\n", *[b"failed to load model\n"] * 9], MemoryFullError),
        ([b"failed to open GGUF file '%s'\n"], ModelFileError),
    ],
)
def test_a_load_without_memory_is_not_taken_for_a_damaged_file(
    opened: OpenModel,
    store: ModelStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[bytes],
    error: type[Exception],
) -> None:
    """A model that was evaluated meanwhile cleared the log; and a folder named `memory` was a lack of it."""
    running = opened()
    path = tmp_path / "memory" / "model.gguf"
    path.parent.mkdir()
    shutil.copy(store.path(), path)
    lines = [line.replace(b"%s", bytes(path)) for line in lines]
    evaluate = partial(running.forward, request(5))
    monkeypatch.setattr(lib, "llama_model_load_from_file", failing(lines, None, evaluate))
    with pytest.raises(error, match=lines[0].decode().strip()):
        LlamaModel(path)


def test_a_context_knows_its_own_attention(opened: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that another thread opened at the same time once decided whether results are exact."""
    make = lib.llama_init_from_model

    def making(*arguments: object) -> object:
        made = make(*arguments)
        with ThreadPoolExecutor(1) as another:
            said = b"Flash Attention was auto, set to disabled\n"
            another.submit(runtime.log.callback, 2, said, None).result(PATIENCE)
        return made

    monkeypatch.setattr(lib, "llama_init_from_model", making)
    assert opened(flash_attention="auto").context.flash_attention is True
