"""The memory and cores of a machine or container; the number of threads beside other programs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from llama_cpp import llama_cpp as lib

from forward_requests import evaluate, request, text
from llamaspec.kernels import Kernels
from llamaspec.llama import context, resources, runtime
from llamaspec.llama.resources import LASTING_WINDOW, PAUSE, WINDOW, ThreadGovernor, Usage, usage
from model_store import OpenModel
from patience import until
from tiny_models import Recipe


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
    assert resources.cpu_quota(write(tmp_path, files)) == quota


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
                f"{TOP}a/memory.stat": "anon 300\nfile 400\nshmem 50\n",  # the page cache counts as free
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
    assert resources.container_room(write(tmp_path, files)) == room


def test_total_memory_is_that_of_the_container_if_it_has_less(tmp_path: Path) -> None:
    groups = {"proc/self/cgroup": "0::/pod/own", "sys/fs/cgroup/pod/own/memory.max": "max"}
    assert resources.total_bytes(write(tmp_path, groups)) == psutil.virtual_memory().total
    write(tmp_path, {"sys/fs/cgroup/pod/memory.max": "7000"})
    assert resources.total_bytes(tmp_path) == 7000


def test_free_memory_is_less_than_all_memory() -> None:
    """On macOS, all memory of the machine once counted as free."""
    assert 0 < resources.available_bytes() < psutil.virtual_memory().total


def test_cores_of_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Apple Silicon only the performance cores count; older Macs do not report them."""
    answers = {"hw.perflevel0.physicalcpu": "6\n"}

    def sysctl(command: list[str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(stdout=answers.get(command[-1], ""))

    monkeypatch.setattr(resources, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(resources, "subprocess", SimpleNamespace(run=sysctl))
    assert resources.n_full_speed_cores() == 6
    answers.clear()
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 10)
    assert resources.n_full_speed_cores() == 10
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert resources.n_full_speed_cores() == 4  # half of the hardware threads


def cores(n: int, ghz: float, *, smt: int = 1, capacity: int | None = None) -> list[dict[str, str | int]]:
    """Equal cores: what Linux says about each, with its number of hardware threads."""
    said: dict[str, str | int] = {"smt": smt, "cpufreq/cpuinfo_max_freq": round(1e6 * ghz)}
    return [said | ({} if capacity is None else {"cpu_capacity": capacity})] * n


def write_topology(root: Path, said: list[dict[str, str | int]], n_listed: int = 0) -> None:
    """Write /sys of a machine with these cores; on hybrids, Intel's driver lists the threads of the first."""
    cpu = 0
    for i, core in enumerate(said):
        threads = range(cpu, cpu + int(core["smt"]))
        if i == n_listed and n_listed:
            write(root, {"sys/devices/cpu_core/cpus": f"0-{cpu - 1}\n"})
        facts = {"topology/thread_siblings": f"{sum(1 << thread for thread in threads):08x}"}
        facts |= {name: str(value) for name, value in core.items() if name != "smt"}
        for cpu in threads:
            write(
                root,
                {f"sys/devices/system/cpu/cpu{cpu}/{name}": f"{value}\n" for name, value in facts.items()},
            )
        cpu += 1


ULTRA_265K = [*cores(2, 5.5), *cores(6, 5.4), *cores(12, 4.6)]
I7_13700K = [*cores(2, 5.4, smt=2), *cores(6, 5.3, smt=2), *cores(8, 4.2)]
I9_12900 = [*cores(2, 5.1, smt=2), *cores(6, 4.9, smt=2), *cores(8, 3.8)]
TWO_CCDS = [core for rank in range(16) for core in cores(1, 5.75 * 0.98**rank, smt=2)]
RK3588 = [*cores(4, 1.8, capacity=398), *cores(2, 2.4, capacity=1024), *cores(2, 2.26, capacity=965)]
PHONE = [*cores(3, 2.0, capacity=325), *cores(4, 2.8, capacity=850), *cores(1, 3.36, capacity=1024)]


@pytest.mark.parametrize(
    ("said", "n_listed", "affinity", "n_cores", "n_threads"),
    [
        (ULTRA_265K, 8, range(20), 8, 8),
        (ULTRA_265K, 0, range(20), 8, 8),  # an old kernel: frequencies tell
        (I7_13700K, 8, range(24), 8, 16),
        (I7_13700K, 0, range(24), 8, 16),
        (I9_12900, 8, range(24), 8, 16),
        (I7_13700K, 8, [2, 3, 4, 5, 18, 19], 2, 4),  # a container
        (I7_13700K, 8, range(16, 20), 4, 4),  # one with slow cores only
        (cores(16, 3.8, smt=2), 0, range(32), 16, 32),  # a Xeon
        (TWO_CCDS, 0, range(32), 16, 32),  # an AMD: each core has its own frequency, the last 26 % less
        ([*cores(1, 4.0, smt=2), *cores(9, 3.5, smt=2)], 0, range(20), 10, 20),  # one favoured core
        (cores(4, 2.4), 0, range(4), 4, 4),  # a Raspberry Pi 5
        (RK3588, 0, range(8), 4, 4),
        (RK3588, 0, range(4), 4, 4),
        (PHONE, 0, range(8), 5, 5),
        ([*cores(4, 2.4, capacity=780), *cores(4, 3.0, capacity=1024)], 0, range(8), 8, 8),  # two good kinds
        ([{"smt": 2}] * 4, 0, range(8), 4, 8),  # a virtual machine knows nothing
    ],
)
def test_only_fast_cores_count(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: list[dict[str, str | int]],
    n_listed: int,
    affinity: Iterable[int],
    n_cores: int,
    n_threads: int,
) -> None:
    """Once, all cores of a hybrid counted: fast ones waited for slow ones in every operation."""
    write_topology(tmp_path, said, n_listed)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(affinity), raising=False)
    assert resources.n_full_speed_cores(tmp_path) == n_cores
    assert len(resources.full_speed_threads(tmp_path)) == n_threads


# The number of threads

STEP = 0.02  # seconds of an evaluation with all cores to itself


class Machine:
    """A machine with other programs that never sleep, and evaluations that spin."""

    def __init__(
        self, n_cores: int, most: int | None = None, *, spins: float = 1.0, shortest: float = WINDOW
    ) -> None:
        self.n_cores, self.n_others = n_cores, 0.0
        self.spins = spins  # part of an evaluation's time that each of its threads uses
        self.wall, self.own, self.idle = 0.0, 0.0, 500.0
        self.n_looks = 0
        self.governor = ThreadGovernor(
            most or n_cores, n_cores, shortest, self.look, lambda: self.wall, lambda: math.ceil(self.n_others)
        )

    def look(self) -> Usage:
        self.n_looks += 1
        return Usage(self.wall, self.own, self.idle)

    def rest(self, seconds: float, n_own: float = 0.0) -> None:
        """Simulate seconds without evaluations; `n_own` cores do other work of this process."""
        self.wall += seconds
        self.own += seconds * n_own
        self.idle += seconds * max(self.n_cores - self.n_others - n_own, 0)

    def evaluate(self, seconds: float = STEP) -> int:
        """Simulate an evaluation; return its number of threads."""
        self.governor.begin()
        n = self.governor.n_threads
        wanted = n * self.spins + self.n_others
        share = min(1.0, self.n_cores / wanted)  # of a core that each thread gets
        self.wall += seconds / share
        self.own += seconds / share * n * self.spins * share
        self.idle += seconds / share * max(self.n_cores - wanted, 0.0)
        self.governor.finish(n)
        return n

    def run(self, n: int = 40, seconds: float = STEP) -> list[int]:
        return [self.evaluate(seconds) for _ in range(n)]


def test_an_idle_machine_uses_all_cores() -> None:
    assert set(Machine(4).run()) == {4}


@pytest.mark.parametrize(
    ("n_cores", "n_others", "expected"), [(2, 1, 1), (2, 2, 1), (8, 1, 7), (8, 3, 5), (8, 9, 1)]
)
def test_threads_follow_the_load_of_other_programs(n_cores: int, n_others: int, expected: int) -> None:
    machine = Machine(n_cores)
    machine.run()
    machine.n_others = n_others
    assert machine.run()[-1] == expected
    machine.n_others = 0
    assert machine.run()[-1] == n_cores


def test_a_load_is_noticed_within_two_windows() -> None:
    machine = Machine(2)
    machine.run()
    machine.n_others = 1
    assert machine.run(11)[-1] == 1  # 0.2 seconds of evaluations and the next one


def test_a_load_of_less_than_half_a_core_does_not_count() -> None:
    machine = Machine(4)
    machine.n_others = 0.4
    assert set(machine.run()) == {4}


def test_threads_that_sleep_while_they_wait_miss_no_time() -> None:
    assert set(Machine(4, spins=0.6).run()) == {4}


def test_spare_hardware_threads_are_not_used() -> None:
    """Hardware threads beyond the full-speed cores: 4 of 8."""
    machine = Machine(8, most=4)
    assert set(machine.run()) == {4}
    machine.n_others = 6
    assert machine.run()[-1] < 4
    machine.n_others = 0
    assert machine.run()[-1] == 4


def test_idle_time_between_completions_does_not_count() -> None:
    machine = Machine(2)
    machine.n_others = 1
    assert machine.run()[-1] == 1
    for _ in range(20):
        machine.n_others = 0
        machine.rest(2 * PAUSE)
        machine.n_others = 1
        assert machine.evaluate() == 1


def test_after_a_pause_a_new_window_starts() -> None:
    """Cores that were idle during the pause do not count as free."""
    machine = Machine(2)
    machine.n_others = 1
    assert machine.run()[-1] == 1
    n_looks = machine.n_looks
    machine.rest(0.1)
    machine.evaluate()
    assert machine.n_looks == n_looks + 1


@pytest.mark.parametrize(("n_others", "expected"), [(0, 4), (1, 3), (2, 2), (5, 1)])
@pytest.mark.parametrize(("shortest", "seconds"), [(WINDOW, 0.3), (LASTING_WINDOW, 1.5)])
def test_the_first_evaluation_leaves_cores_to_other_programs(
    n_others: int, expected: int, shortest: float, seconds: float
) -> None:
    """The first prompt on a busy machine once had all threads: the load was only seen after it."""
    machine = Machine(4, shortest=shortest)
    machine.n_others = n_others
    machine.governor.look()
    machine.rest(
        seconds, n_own=max(0.0, min(1.0, 4 - n_others))
    )  # loading a model takes a core: no other load
    assert machine.evaluate() == expected


@pytest.mark.parametrize(
    ("shortest", "seconds"), [(WINDOW, 0.06), (LASTING_WINDOW, 0.8)], ids=["short", "not lasting"]
)
def test_a_short_look_at_the_load_decides_nothing(shortest: float, seconds: float) -> None:
    machine = Machine(4, shortest=shortest)
    machine.n_others = 3
    machine.governor.look()
    machine.rest(seconds)
    assert machine.evaluate() == 4


def test_after_a_long_pause_its_load_decides() -> None:
    """A server waits for a request, and another program begins or ends meanwhile."""
    machine = Machine(4, most=3)  # one core stays idle
    machine.run()
    for n_others, expected in [(3, 1), (0, 3), (1, 2), (2, 1)]:
        machine.n_others = n_others
        machine.rest(5.0, n_own=0.1)
        machine.governor.look()  # another model is opened: the pause goes on
        machine.rest(5.0)
        assert machine.evaluate() == expected


def test_a_load_that_ends_with_the_pause_is_forgotten() -> None:
    """An agent runs tests and then sends their output: its prompt had one thread."""
    machine = Machine(4)
    machine.run()
    for _ in range(3):
        machine.n_others = 3
        machine.rest(5.0)
        machine.n_others = 0
        assert set(machine.run(7)) == {4}


def test_programs_that_run_are_counted() -> None:
    before = resources.n_running_elsewhere()
    if before is None:
        pytest.skip("this system does not count them")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until(lambda: (resources.n_running_elsewhere() or 0) >= 1)
        assert all((resources.n_running_elsewhere() or 0) >= 1 for _ in range(20))
    finally:
        busy.kill()
        busy.wait()


def test_idle_time_that_is_not_counted_is_no_load() -> None:
    """Some sandboxes report zeros; the number would never rise again."""
    machine = Machine(4)
    machine.idle = 0.0
    machine.n_others = 4  # adds no idle time
    machine.governor.look()
    machine.rest(5.0)
    assert machine.evaluate() == 4


def test_short_evaluations_share_a_window() -> None:
    machine = Machine(2)
    machine.n_others = 1
    assert machine.run(2000, 0.0005)[-1] == 1
    assert machine.n_looks < 40


def test_programs_on_slow_cores_take_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores beyond the fast ones once had to be idle, as the second hardware threads of cores."""
    wall = 0.0
    monkeypatch.setattr(resources, "watched_threads", lambda: frozenset(range(8)))
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [SimpleNamespace(idle=0.0)] * 20)
    clock = SimpleNamespace(perf_counter=lambda: wall, process_time=lambda: 8 * wall)
    monkeypatch.setattr(resources, "time", clock)
    governor = ThreadGovernor(8, resources.n_hardware_threads(), WINDOW, usage, lambda: wall)
    for _ in range(40):
        governor.begin()
        wall += STEP
        governor.finish(8)
        assert governor.n_threads == 8


def test_one_core_needs_no_measurement() -> None:
    machine = Machine(1)
    machine.n_others = 2
    assert set(machine.run()) == {1}
    assert machine.n_looks == 0


class Unsteady(Machine):
    """A machine with one other program that comes and goes; beside it, spinning threads are slow."""

    def __init__(self, step: float, period: float, n: int | None = None) -> None:
        super().__init__(2)
        self.step, self.period, self.fixed = step, period, n

    def evaluate(self, seconds: float = 0.005) -> int:
        """Simulate an evaluation that takes one thread `step` seconds, in slices of `seconds`."""
        self.governor.begin()
        n, left = self.fixed or self.governor.n_threads, self.step
        while left > 0:
            n_others = int(self.wall / self.period) % 2
            left -= seconds * (0.15 if n + n_others > self.n_cores else n)
            used = min(n, n * self.n_cores / (n + n_others))
            self.wall += seconds
            self.own += seconds * used
            self.idle += seconds * max(self.n_cores - used - n_others, 0)
        self.governor.finish(n)
        return n

    def speed(self) -> float:
        """Return the evaluations per second, over a minute."""
        n = 0
        while self.wall < 60:
            self.evaluate()
            n += 1
        return n / self.wall


@pytest.mark.parametrize("period", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("step", [0.04, 0.15, 0.6])
def test_a_load_that_comes_and_goes(step: float, period: float) -> None:
    """With long evaluations, every choice came too late: 0.78 of the speed of a fixed number."""
    best = max(Unsteady(step, period, n).speed() for n in (1, 2))
    assert Unsteady(step, period).speed() >= 0.9 * best


def test_a_short_load_changes_nothing_if_bits_depend_on_the_number() -> None:
    """After one disturbed evaluation, a completion of a minute had one thread instead of two."""
    machine = Machine(2, shortest=LASTING_WINDOW)
    machine.run(100)
    machine.n_others = 1
    machine.run(5)
    machine.n_others = 0
    assert set(machine.run(100)) == {2}
    machine.n_others = 1
    assert machine.run(100)[-1] == 1
    machine.n_others = 0
    assert machine.run(150)[-1] == 2


def test_missed_time_depends_on_the_threads_that_were_used() -> None:
    """Evaluations of another model may use another number."""
    machine = Machine(2, shortest=LASTING_WINDOW)
    for _ in range(200):
        machine.governor.begin()
        machine.wall += STEP
        machine.own += STEP
        machine.idle += STEP
        machine.governor.finish(1)
    assert machine.governor.n_threads == 2


@pytest.mark.parametrize(
    ("flash_attention", "kernels", "which"),
    [("on", Kernels(), 1), ("off", Kernels(), 0), ("on", Kernels("avx2", 1), 0)],
)
def test_only_llama_cpps_flash_attention_waits_for_a_lasting_load(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, flash_attention: str, kernels: Kernels, which: int
) -> None:
    monkeypatch.setattr(runtime, "kernels", lambda: kernels)
    machines = Machine(4), Machine(4, shortest=LASTING_WINDOW)
    monkeypatch.setattr(context, "governors", lambda: tuple(each.governor for each in machines))
    model = opened(threads=None, flash_attention=flash_attention)
    used: list[int] = []
    decode = lib.llama_decode

    def noted(context: object, batch: object) -> int:
        used.append(lib.llama_n_threads(context))
        return int(decode(context, batch))

    monkeypatch.setattr(lib, "llama_decode", noted)
    for n_others in (0.0, 2.0):
        machines[which].n_others = n_others
        machines[which].rest(9.0)
        model.forward(request(9))  # the first evaluation beside this load
    assert used == [4, 2]


@pytest.mark.parametrize(
    ("options", "is_same"),
    [
        ({"flash_attention": "off"}, True),
        ({"flash_attention": "on", "cache_type_v": "bf16"}, True),
        ({"flash_attention": "on"}, False),
    ],
)
def test_whether_logits_depend_on_the_number_of_threads(
    opened: OpenModel, options: dict[str, str], is_same: bool
) -> None:
    """With flash attention over f16, 512 tokens deep, llama.cpp splits the cache among threads; we do not."""
    is_same |= runtime.kernels().level is not None
    logits = []
    for threads in (1, 2, 3):
        model = opened("llama", Recipe(dtype="q8_0", n_context=2048), threads=threads, **options)
        evaluate(model, [(0, request(600, n_logits=0))])
        scored = [model.forward(request(600 + w, draft=text(w, 9)), 0).copy() for w in (0, 3, 15)]
        logits.append(np.concatenate(scored))
    assert all(np.array_equal(each, logits[0]) for each in logits) == is_same
