"""How many threads evaluate, on a machine that shares its cores as an operating system does."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from llamaspec.llama import runtime
from llamaspec.llama.threads import PAUSE, ThreadGovernor, Usage

STEP = 0.02  # seconds of an evaluation with all cores to itself


class Machine:
    """Some cores, some other programs that never rest, and evaluations that spin."""

    def __init__(self, n_cores: int, most: int | None = None, *, spins: float = 1.0) -> None:
        self.n_cores, self.n_others = n_cores, 0.0
        self.spins = spins  # part of an evaluation's time that each of its threads uses
        self.wall = self.own = self.idle = 0.0
        self.n_looks = 0
        self.governor = ThreadGovernor(most or n_cores, n_cores, self.look, lambda: self.wall)

    def look(self) -> Usage:
        self.n_looks += 1
        return Usage(self.wall, self.own, self.idle)

    def rest(self, seconds: float) -> None:
        self.wall += seconds
        self.idle += seconds * max(self.n_cores - self.n_others, 0)

    def evaluate(self, seconds: float = STEP) -> int:
        """One evaluation; returns its threads."""
        self.governor.begin()
        n = self.governor.n_threads
        wanted = n * self.spins + self.n_others
        share = min(1.0, self.n_cores / wanted)  # of its core that each gets
        self.wall += seconds / share
        self.own += seconds / share * n * self.spins * share
        self.idle += seconds / share * max(self.n_cores - wanted, 0.0)
        self.governor.finish()
        return n

    def run(self, n: int = 40, seconds: float = STEP) -> list[int]:
        return [self.evaluate(seconds) for _ in range(n)]


def test_all_cores_of_a_quiet_machine() -> None:
    assert set(Machine(4).run()) == {4}


@pytest.mark.parametrize(
    ("n_cores", "n_others", "expected"), [(2, 1, 1), (2, 2, 1), (8, 1, 7), (8, 3, 5), (8, 9, 1)]
)
def test_others_take_cores_and_give_them_back(n_cores: int, n_others: int, expected: int) -> None:
    machine = Machine(n_cores)
    machine.run()
    machine.n_others = n_others
    assert machine.run()[-1] == expected
    machine.n_others = 0
    assert machine.run()[-1] == n_cores


def test_it_is_noticed_within_two_windows() -> None:
    machine = Machine(2)
    machine.run()
    machine.n_others = 1
    assert machine.run(11)[-1] == 1  # 0.2 seconds of evaluating, and the one after


def test_what_takes_less_than_half_a_core_does_not_count() -> None:
    machine = Machine(4)
    machine.n_others = 0.4
    assert set(machine.run()) == {4}


def test_threads_that_sleep_while_they_wait_are_not_robbed() -> None:
    assert set(Machine(4, spins=0.6).run()) == {4}


def test_cores_that_are_idle_anyway_are_not_taken() -> None:
    """Hardware threads beyond the full-speed cores: 4 of 8."""
    machine = Machine(8, most=4)
    assert set(machine.run()) == {4}
    machine.n_others = 6
    assert machine.run()[-1] < 4
    machine.n_others = 0
    assert machine.run()[-1] == 4


def test_idleness_between_two_texts_says_nothing() -> None:
    machine = Machine(2)
    machine.n_others = 1
    assert machine.run()[-1] == 1
    for _ in range(20):
        machine.n_others = 0
        machine.rest(2 * PAUSE)
        machine.n_others = 1
        assert machine.evaluate() == 1


def test_a_machine_may_have_become_another_within_a_tenth_of_a_second() -> None:
    """What was idle while nobody evaluated is not counted as free."""
    machine = Machine(2)
    machine.n_others = 1
    assert machine.run()[-1] == 1
    n_looks = machine.n_looks
    machine.rest(0.1)
    machine.evaluate()
    assert machine.n_looks == n_looks + 1


def test_short_evaluations_are_looked_at_together() -> None:
    machine = Machine(2)
    machine.n_others = 1
    assert machine.run(2000, 0.0005)[-1] == 1
    assert machine.n_looks < 40


def test_one_core_needs_no_look() -> None:
    machine = Machine(1)
    machine.n_others = 2
    assert set(machine.run()) == {1}
    assert machine.n_looks == 0


class Unsteady(Machine):
    """One other program, which comes and goes; threads that spin get little done beside it."""

    def __init__(self, step: float, period: float, n: int | None = None) -> None:
        super().__init__(2)
        self.step, self.period, self.fixed = step, period, n

    def evaluate(self, seconds: float = 0.005) -> int:
        """As long as one thread alone takes `step`, in slices of so many seconds."""
        self.governor.begin()
        n, left = self.fixed or self.governor.n_threads, self.step
        while left > 0:
            n_others = int(self.wall / self.period) % 2
            left -= seconds * (0.15 if n + n_others > self.n_cores else n)
            used = min(n, n * self.n_cores / (n + n_others))
            self.wall += seconds
            self.own += seconds * used
            self.idle += seconds * max(self.n_cores - used - n_others, 0)
        self.governor.finish()
        return n

    def speed(self) -> float:
        """Evaluations per second, over a minute."""
        n = 0
        while self.wall < 60:
            self.evaluate()
            n += 1
        return n / self.wall


@pytest.mark.parametrize("period", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("step", [0.04, 0.15, 0.6])
def test_a_load_that_comes_and_goes(step: float, period: float) -> None:
    """As long as evaluations take, every choice was the one for the moment before: 0.78 of a fixed number."""
    best = max(Unsteady(step, period, n).speed() for n in (1, 2))
    assert Unsteady(step, period).speed() >= 0.9 * best


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, None),
    ],
)
def test_the_quota_of_a_container(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert runtime.cpu_quota(write(tmp_path, files)) == quota


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
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert runtime._full_speed_cores() == 4  # half of the hardware threads
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert runtime._full_speed_cores() == 1


def test_memory_where_the_system_does_not_say_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_path: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", nothing)
    whole = runtime.available_bytes()
    assert whole == psutil.virtual_memory().total
    monkeypatch.delattr(os, "sysconf")
    assert runtime.available_bytes() is None
