"""The process and the machine: memory, cores, threads, what is raised in callbacks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from llama_cpp import llama_cpp as lib

from forward_requests import evaluate, request, text
from llamaspec import EvaluationError
from llamaspec.llama import runtime
from llamaspec.llama.runtime import ThreadChooser, Usage
from model_store import OpenModel
from tiny_models import Recipe


class Machine:
    """Some cores, some other programs that never rest, and threads that spin while they evaluate."""

    def __init__(self, n_cores: int, most: int | None = None) -> None:
        self.n_cores, self.n_others = n_cores, 0.0
        self.wall = self.own = self.idle = 0.0
        self.chooser = ThreadChooser(most or n_cores, n_cores, self.look)

    def look(self) -> Usage:
        return Usage(self.wall, self.own, self.idle)

    def text(self, seconds: float = 5.0) -> int:
        """One text; returns its threads."""
        n = self.chooser.choose()
        share = min(1.0, self.n_cores / (n + self.n_others))  # of its core that each thread gets
        self.wall += seconds
        self.own += seconds * n * share
        self.idle += seconds * max(self.n_cores - n - self.n_others, 0.0)
        return n


@pytest.mark.parametrize(
    ("n_cores", "n_others", "expected"),
    [(4, 0, 4), (4, 0.4, 4), (2, 1, 1), (2, 2, 1), (8, 1, 7), (8, 3, 5), (8, 9, 1), (1, 2, 1)],
)
def test_other_programs_take_cores_and_give_them_back(n_cores: int, n_others: float, expected: int) -> None:
    machine = Machine(n_cores)
    assert [machine.text() for _ in range(3)] == [n_cores] * 3
    machine.n_others = n_others
    assert [machine.text() for _ in range(9)][-1] == expected
    machine.n_others = 0
    machine.text()
    assert machine.text() == n_cores


def test_cores_that_are_idle_anyway_are_not_taken() -> None:
    """Hardware threads beyond the full-speed cores: 4 of 8."""
    machine = Machine(8, most=4)
    assert {machine.text() for _ in range(3)} == {4}
    machine.n_others = 6
    assert [machine.text() for _ in range(5)][-1] == 3


def test_too_short_a_time_says_nothing() -> None:
    machine = Machine(2)
    machine.n_others = 1
    assert [machine.text(0.02) for _ in range(5)] == [2] * 5
    assert machine.text() == 1


def test_the_number_of_threads_stays_while_a_text_runs(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores depend on it; the next text that begins beside no other gets another number."""
    machine = Machine(4)
    monkeypatch.setattr(runtime, "thread_chooser", lambda: machine.chooser)
    model = opened(threads=None)
    (made,) = model._contexts
    used = []
    for row, n_others in ((0, 3.0), (0, 3.0), (1, 3.0), (2, 3.0)):
        machine.text()
        machine.n_others = n_others
        model.forward(request(9 + row), row)
        used.append(lib.llama_n_threads(made.pointer))
        if row == 1:
            model.release(0)
            model.release(1)
    assert used == [4, 4, 4, 2]


@pytest.mark.parametrize(
    ("options", "is_same"),
    [
        ({"flash_attention": "off"}, True),
        ({"flash_attention": "on", "cache_type_v": "bf16"}, True),
        ({"flash_attention": "on"}, False),
    ],
)
def test_whether_scores_depend_on_the_number_of_threads(
    opened: OpenModel, options: dict[str, str], is_same: bool
) -> None:
    """With flash attention over f16, 512 tokens deep, llama.cpp splits the cache among threads."""
    logits = []
    for threads in (1, 2, 3):
        model = opened("llama", Recipe(dtype="q8_0", n_context=2048), threads=threads, **options)
        evaluate(model, [(0, request(600, n_logits=0))])
        scored = [model.forward(request(600 + w, draft=text(w, 9)), 0).copy() for w in (0, 3, 15)]
        logits.append(np.concatenate(scored))
    assert all(np.array_equal(each, logits[0]) for each in logits) == is_same


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


def test_free_memory_is_what_the_system_can_give() -> None:
    """On macOS, all memory of the machine once counted as free."""
    assert 0 < runtime.available_bytes() < psutil.virtual_memory().total


def test_cores_where_the_system_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Apple silicon only the fast cores count; older Macs do not name them."""
    answers = {"hw.perflevel0.physicalcpu": "6\n", "hw.physicalcpu": "10\n"}

    def sysctl(command: list[str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(stdout=answers.get(command[-1], ""))

    monkeypatch.setattr(runtime, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(runtime, "subprocess", SimpleNamespace(run=sysctl))
    assert runtime._full_speed_cores() == 6
    del answers["hw.perflevel0.physicalcpu"]
    assert runtime._full_speed_cores() == 10
    answers.clear()
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert runtime._full_speed_cores() == 4  # half of the hardware threads


def test_what_is_raised_in_a_callback_is_raised_behind_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that: what else nobody can be told of goes where it always goes, and afterwards all does."""
    shown: list[object] = []
    usual = shown.append
    monkeypatch.setattr(sys, "unraisablehook", usual)
    in_a_callback = SimpleNamespace(exc_value=KeyError("x"), err_msg="ignored on calling ctypes callback")
    elsewhere = SimpleNamespace(exc_value=KeyError("y"), err_msg="ignored in")
    with pytest.raises(KeyError, match="x"), runtime.raising_callbacks():  # noqa: PT012
        sys.unraisablehook(elsewhere)
        sys.unraisablehook(in_a_callback)
    assert shown == [elsewhere]
    assert sys.unraisablehook is usual


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
