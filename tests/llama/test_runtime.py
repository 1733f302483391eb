"""The process and the machine: memory, cores, threads, what is raised in callbacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from llama_cpp import llama_cpp as lib

from forward_requests import request
from llamaspec import EvaluationError
from llamaspec.llama import runtime
from model_store import OpenModel
from patience import PATIENCE


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


GROUPS = {"proc/self/cgroup": "0::/a/b\n"}
OLD_GROUPS = {"proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n"}
TOP = "sys/fs/cgroup/"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({**GROUPS, f"{TOP}cpu.max": "max 100000\n"}, None),
        ({**GROUPS, f"{TOP}cpu.max": "250000 100000\n"}, 2.5),
        ({**GROUPS, f"{TOP}a/cpu.max": "150000 100000\n", f"{TOP}a/b/cpu.max": "400000 100000\n"}, 1.5),
        (
            {
                **OLD_GROUPS,
                f"{TOP}cpu/x/cpu.cfs_quota_us": "300000\n",
                f"{TOP}cpu/x/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                **OLD_GROUPS,
                f"{TOP}cpu/cpu.cfs_quota_us": "-1\n",
                f"{TOP}cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({**GROUPS, f"{TOP}cpu.max": "nonsense\n"}, None),
    ],
)
def test_the_cores_of_a_container(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert runtime.cpu_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, None),
        ({**GROUPS, f"{TOP}a/memory.max": "max\n", f"{TOP}a/memory.current": "5\n"}, None),
        (
            {
                **GROUPS,
                f"{TOP}a/memory.max": "1000\n",
                f"{TOP}a/memory.current": "700\n",
                f"{TOP}a/memory.stat": "anon 300\nfile 400\nshmem 50\n",  # files can be read again
                f"{TOP}a/b/memory.max": "2000\n",
                f"{TOP}a/b/memory.current": "700\n",
            },
            650,
        ),
        ({**GROUPS, f"{TOP}memory.max": "100\n", f"{TOP}memory.current": "700\n"}, 0),
        (
            {
                **OLD_GROUPS,
                f"{TOP}memory/x/memory.limit_in_bytes": "500\n",
                f"{TOP}memory/x/memory.usage_in_bytes": "300\n",
                f"{TOP}memory/x/memory.stat": "cache 7\ntotal_cache 100\n",
            },
            300,
        ),
    ],
)
def test_the_memory_of_a_container(tmp_path: Path, files: dict[str, str], room: int | None) -> None:
    """Once, only the machine's memory counted, and the container's limit ended the process."""
    assert runtime.container_room(write(tmp_path, files)) == room


def test_all_memory_is_the_containers_where_that_has_less(tmp_path: Path) -> None:
    groups = {"proc/self/cgroup": "0::/pod/own", "sys/fs/cgroup/pod/own/memory.max": "max"}
    assert runtime.total_bytes(write(tmp_path, groups)) == psutil.virtual_memory().total
    write(tmp_path, {"sys/fs/cgroup/pod/memory.max": "7000"})
    assert runtime.total_bytes(tmp_path) == 7000


def test_free_memory_is_what_the_system_can_give() -> None:
    """On macOS, all memory of the machine once counted as free."""
    assert 0 < runtime.available_bytes() < psutil.virtual_memory().total


def test_cores_where_the_system_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Apple silicon only the fast cores count; older Macs do not name them."""
    answers = {"hw.perflevel0.physicalcpu": "6\n"}

    def sysctl(command: list[str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(stdout=answers.get(command[-1], ""))

    monkeypatch.setattr(runtime, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(runtime, "subprocess", SimpleNamespace(run=sysctl))
    assert runtime._full_speed_cores() == 6
    answers.clear()
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 10)
    assert runtime._full_speed_cores() == 10
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert runtime._full_speed_cores() == 4  # half of the hardware threads


def in_a_callback(name: str) -> Any:
    """What ctypes tells the hook when a callback raises KeyError(name)."""
    return SimpleNamespace(exc_value=KeyError(name), err_msg="ignored on calling ctypes callback")


def test_what_is_raised_in_a_callback_is_raised_behind_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that: what else nobody can be told of goes where it always goes, and afterwards all does."""
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
    """Two models were loaded at once, and the one that ended last put the other's dead hook back.

    From then on, what any callback of the process raised was lost.
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


def test_a_block_inside_another_gets_its_own() -> None:
    usual = sys.unraisablehook
    with pytest.raises(KeyError, match="outer"), runtime.raising_callbacks():  # noqa: PT012
        with pytest.raises(KeyError, match="inner"), runtime.raising_callbacks():
            sys.unraisablehook(in_a_callback("inner"))
        sys.unraisablehook(in_a_callback("outer"))
    assert sys.unraisablehook is usual


def _call(function: Callable[[Any], object], argument: object) -> None:
    function(argument)


def test_a_hook_that_somebody_sets_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook often calls the one before it: ours may be called after the block, and must not call itself."""
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    for _ in range(2):
        with runtime.raising_callbacks():
            after = sys.unraisablehook = partial(_call, sys.unraisablehook)
        assert sys.unraisablehook is after
    error = in_a_callback("x")
    sys.unraisablehook(error)
    assert shown == [error]


def test_a_failure_is_not_explained_by_an_older_one(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, the oldest of the last eight errors was the reason, whatever it belonged to."""
    model = opened()
    runtime._log.callback(4, b"an error of long ago\n", None)

    def fails(*_: object) -> int:
        runtime._log.callback(4, b"the cause\n", None)
        runtime._log.callback(4, b"its consequence\n", None)
        return -3

    monkeypatch.setattr(lib, "llama_decode", fails)
    with pytest.raises(EvaluationError, match=r"\(code -3\): the cause$"):
        model.forward(request(5))
