"""Probes and learned priors are kept; a file that cannot be used is ignored, and the reason is printed."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from command import generate
from llamaspec import ModelOptions
from llamaspec.kernels import KernelLibrary, Kernels
from llamaspec.length.automatic import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.prior import LearnedPrior
from llamaspec.measure import store
from llamaspec.measure.probe import Probe, WidthTiming
from llamaspec.measure.store import BenchGains, forget, keep, keep_probe, stored
from llamaspec.measure.turns import Spread
from llamaspec.plan import DraftPlan, ModelFile
from llamaspec.values import Draft, Evaluation, Round
from patience import PATIENCE

TIMING = Spread(0.009, 0.01, 0.012)
PROBE = Probe(
    depths=(64, 1024),
    left_out_depths=(),
    widths=(WidthTiming(1, (TIMING, TIMING), 0.0), WidthTiming(4, (TIMING, TIMING), 1e-3)),
    draft_step=TIMING,
)
EARLIER = LearnedPrior(
    CostCurve((1, 3), (0.02, 0.03), 0.004), tuple(i / 4 for i in range(10)), 32, counts=(9,) * 10
)
DEEP = "[" * 3000 + "]" * 3000


def on_disk(path: Path, options: ModelOptions | None = None) -> DraftPlan:
    return DraftPlan(ModelFile(path, options or ModelOptions(threads=1)))


@pytest.fixture
def pair(target_file: Path, own_cache: None) -> DraftPlan:
    return on_disk(target_file)


def place_of_probe(pair: DraftPlan, tmp_path: Path) -> Path:
    """Return the file of a probe."""
    keep(pair, PROBE)
    (path,) = {*tmp_path.rglob("*.json")} - {*tmp_path.rglob("*.runs.json")}
    return path


def place_of_prior(pair: DraftPlan, tmp_path: Path) -> Path:
    """Return the file of a learned prior."""
    keep(pair, EARLIER)
    (path,) = tmp_path.rglob("*.runs.json")
    return path


Place = Callable[[DraftPlan, Path], Path]
PLACES = pytest.mark.parametrize("place", [place_of_probe, place_of_prior])


def test_what_is_kept_is_found(pair: DraftPlan, tmp_path: Path) -> None:
    assert (stored(pair, Probe), stored(pair, LearnedPrior)) == (None, None)
    place_of_prior(pair, tmp_path)
    assert stored(pair, LearnedPrior) == EARLIER
    keep_probe(pair, PROBE)
    assert stored(pair, Probe) == PROBE
    costs_anew = LearnedPrior(PROBE.curve, EARLIER.log_odds, counts=EARLIER.counts)
    assert stored(pair, LearnedPrior) == costs_anew, "a probe says nothing of acceptance"
    assert forget(pair)
    assert not forget(pair)
    assert stored(pair, Probe) is None


def test_measurements_belong_to_a_placement(pair: DraftPlan) -> None:
    """The same files on other workers or devices have other costs."""
    keep_probe(pair, PROBE)
    elsewhere = ({"workers": ("a:1",)}, {"workers": ("b:1",)}, {"devices": ()}, {"tensor_split": (3.0, 1.0)})
    for changes in elsewhere:
        options = ModelOptions(threads=1, **changes)
        other = on_disk(pair.target.path, options)
        assert stored(other, Probe) is None
        keep_probe(other, PROBE)
        assert stored(other, Probe) == PROBE


def test_measurements_belong_to_the_kernels(pair: DraftPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelLibrary, "facts", Kernels("avx2", 1))
    keep_probe(pair, PROBE)
    for facts in (Kernels("avx2", 2), Kernels("avx512", 1), Kernels(reason="off")):
        monkeypatch.setattr(KernelLibrary, "facts", facts)
        assert (stored(pair, Probe), stored(pair, LearnedPrior)) == (None, None)
    monkeypatch.setattr(KernelLibrary, "facts", Kernels("avx2", 1))
    assert stored(pair, Probe) == PROBE
    assert stored(on_disk(pair.target.path, ModelOptions(threads=1, kernels="off")), Probe) is None


def test_measurements_belong_to_a_kind_of_attention(pair: DraftPlan) -> None:
    keep_probe(pair, PROBE)
    usual = pair.target.options
    for options in (
        replace(usual, flash_attention="off"),
        replace(usual, cache_type_k="bf16"),
        replace(usual, cache_type_v="bf16"),
        replace(usual, threads=2),
    ):
        other = on_disk(pair.target.path, options)
        assert (stored(other, Probe), stored(other, LearnedPrior)) == (None, None)


def test_processes_that_write_one_file_lose_no_update(pair: DraftPlan) -> None:
    n_processes, n_groups = 3, 5
    code = (
        "import sys; from pathlib import Path; from llamaspec import ModelOptions; "
        "from llamaspec.measure.store import keep_gains, key_of; "
        "from llamaspec.plan import DraftPlan, ModelFile; "
        "plan = DraftPlan(ModelFile(Path(sys.argv[1]), ModelOptions(threads=1))); "
        f"[keep_gains(key_of(plan), {{f'{{sys.argv[2]}} {{i}}': 2.0}}) for i in range({n_groups})]"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(pair.target.path), str(i)], env=environment)
        for i in range(n_processes)
    ]
    assert [process.wait(PATIENCE) for process in processes] == [0] * n_processes
    gains = stored(pair, BenchGains)
    assert gains is not None
    assert len(gains.speed_ups) == n_processes * n_groups


def test_a_lock_that_is_not_given_back_is_reported(
    pair: DraftPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PATIENCE", 0.01)
    faults: list[str] = []
    keep(pair, EARLIER)
    with FileLock(tmp_path / "curves" / store.LOCK):
        keep(pair, PROBE, faults.append)
    assert "cannot write" in faults[0]
    assert (stored(pair, Probe), stored(pair, LearnedPrior)) == (None, EARLIER)


def faults_of(pair: DraftPlan, place: Place) -> list[str]:
    """Return the faults of the kept file; none if it can be used."""
    faults: list[str] = []
    kept = stored(pair, Probe if place is place_of_probe else LearnedPrior, faults.append)
    assert (kept is None) == bool(faults)
    if isinstance(kept, Probe):
        use(kept.curve)
        assert kept.identical_widths
    elif isinstance(kept, LearnedPrior):
        use(kept)
    return faults


def every_change(content: Any) -> list[Any]:
    """Return the content with each of its parts replaced by something else, one at a time."""
    strange: tuple[Any, ...] = (
        None, "x", -1, 1 << 40, 10**400, float("nan"), float("inf"), 5e-324, 1e308, [], {}, [[[]]], True, 1.5,
    )  # fmt: skip
    changed = [value for value in strange if value != content or type(value) is not type(content)]
    if isinstance(content, dict):
        for key, value in content.items():
            changed += [{**content, key: new} for new in every_change(value)]
            changed.append({other: kept for other, kept in content.items() if other != key})
        changed.append({**content, "unknown": 1})
    elif isinstance(content, list) and content:
        changed += [[*content[:-1], new] for new in every_change(content[-1])]
        changed += [content[:-1], [*content, content[-1]]]
    return changed


def use(prior: CostCurve | LearnedPrior) -> None:
    """Use a prior as a run does."""
    row = (policy := AutoLength(prior)).start_sequence()
    for evaluation in range(3):
        row.wants_more(Draft())
        row.observe(Round(Draft(), 0, 0, Evaluation(1, 1, evaluation), verify_seconds=0.02))
    policy.experience()


@PLACES
def test_no_change_of_a_file_is_a_traceback(pair: DraftPlan, tmp_path: Path, place: Place) -> None:
    """Content that is still accepted has the right types and can be used."""
    path = place(pair, tmp_path)
    content = json.loads(path.read_text())
    if place is place_of_probe:
        path.write_text(json.dumps(content).replace("0.012", "1e300"))
        assert faults_of(pair, place)
    n_accepted = n_refused = 0
    for changed in every_change(copy.deepcopy(content)):
        path.write_text(json.dumps(changed))
        n_faults = len(faults_of(pair, place))
        n_accepted += not n_faults
        n_refused += n_faults
    assert n_refused > 100
    assert n_accepted < n_refused / 5


def test_a_run_warns_in_one_line_and_replaces_the_file(
    models: list[Path], tmp_path: Path, own_cache: None
) -> None:
    options = ("--seed", "5", "-n", "80", "Once upon a time")
    first = generate(*options, models=models)
    (path,) = tmp_path.rglob("*.runs.json")
    path.write_text(DEEP)
    again = generate(*options, models=models)
    assert again.stdout == first.stdout
    (line,) = (line for line in again.stderr.splitlines() if "ignoring" in line)
    assert line.startswith(f"llamaspec: ignoring {path}, which cannot be used: ")
    assert "ignoring" not in generate(*options, models=models).stderr
    assert {found.name for found in path.parent.iterdir()} <= {path.name, store.LOCK}
