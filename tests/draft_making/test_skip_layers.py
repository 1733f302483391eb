"""A draft model made from its target: the known best one is found, and none is made if none is faster."""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from llama_cpp import llama_cpp as lib

from llamaspec import FixedLength, LlamaModel, ModelOptions, open_pair
from llamaspec.draft_making.measuring import Machine, TrialSettings
from llamaspec.draft_making.skip_layers import Candidate, Made, MeasuredCandidate, make_draft, search
from llamaspec.errors import LlamaspecError, ModelFileError
from llamaspec.files import file_identity
from llamaspec.llama import quantize
from llamaspec.llama.child import run_child
from llamaspec.llama.gguf_file import read_gguf
from llamaspec.llama.layer_influence import layer_influence
from llamaspec.llama.quantize import COPY, write_copy
from llamaspec.measure.compare import Task
from llamaspec.measure.probe import sample_tokens
from llamaspec.measure.turns import Spread
from llamaspec.plan import DRAFT_FOR, made_drafts, made_path
from plain_llama import PlainLlama
from tiny_models import HEAD_WRITERS, WRITERS, Recipe, write_llama
from widen_gguf import Widening, write

OPTIONS = ModelOptions(threads=1, n_ctx=256)
SILENT = (2, 3, 4)


class KnownCosts(Machine):
    """A machine without a clock: wider batches cost little more, larger drafts cost more per step."""

    def __init__(self, measured: float = 1.5) -> None:
        self.measured = measured
        self.n_measured = 0

    def round_seconds(self, target: LlamaModel) -> list[float]:
        return [1.0 + 0.05 * n for n in range(9)]

    def step_ratio(self, target: LlamaModel, draft: LlamaModel) -> float:
        return draft.facts().weights_bytes / target.facts().weights_bytes

    def speed_up(self, target: LlamaModel, draft_file: Path, tasks: Sequence[Task]) -> Spread:
        self.n_measured += 1
        return Spread(self.measured, self.measured, self.measured)


@pytest.fixture(scope="module")
def widened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two layers that matter, and three that add nothing."""
    folder = tmp_path_factory.mktemp("widened")
    source = write_llama(folder / "source.gguf", Recipe(seed=4, dtype="f32", end_score=None))
    write(source, Widening(n_layers=5, dtype="F32"), folder / "wide.gguf")
    return folder / "wide.gguf"


def made(target: Path, machine: KnownCosts, texts: tuple[bytes, ...] = (), **options: Any) -> Made:
    with LlamaModel(target, OPTIONS) as model:
        return make_draft(model, TrialSettings(texts), lambda line: None, machine=machine, **options)


def test_layers_that_add_nothing_have_no_influence(widened: Path) -> None:
    with LlamaModel(widened, OPTIONS) as model:
        influence = layer_influence(model.weights, OPTIONS, sample_tokens(model.vocabulary, 64))
    assert [layer for layer, changes in enumerate(influence) if changes < 1e-6] == list(SILENT)
    assert min(influence[:2]) > 1e-3


def test_the_known_best_draft_is_found(widened: Path) -> None:
    before = set(widened.parent.iterdir())
    found = made(widened, KnownCosts(), types=(COPY,))
    best = found.found[0]
    assert best.candidate.pruned == SILENT
    assert best.acceptance == 1.0
    path = widened.with_name("wide.draft-L2-copy.gguf")
    assert found.path == path
    assert set(widened.parent.iterdir()) - before == {path}, "nothing else is left"
    assert made_drafts(widened) == [path]
    assert read_gguf(path).number("block_count") == 2
    with open_pair(widened, path, target_options=OPTIONS, draft_options=OPTIONS) as pair:
        summary = pair.stream("def f(", seed=3, max_tokens=24, policy=FixedLength(3)).run().summary
    assert summary.n_accepted == summary.n_verified > 0
    path.unlink()


def test_one_thread_evaluates(widened: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements were made in the main thread, whose OpenMP threads then slowed all timings."""
    seen: set[str] = set()
    decode = lib.llama_decode

    def noted(*arguments: object) -> object:
        seen.add(threading.current_thread().name)
        return decode(*arguments)

    monkeypatch.setattr(lib, "llama_decode", noted)
    found = made(widened, KnownCosts(measured=0.9), types=(COPY,))
    assert found.found[0].acceptance == 1.0
    assert seen == {"llamaspec-compute"}


def test_nothing_is_written_if_no_draft_is_faster(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target.gguf", Recipe(dtype="q4_0"))
    machine = KnownCosts()
    found = made(target, machine)
    assert found.path is None
    assert found.reason is not None
    assert "predicted" in found.reason
    assert machine.n_measured == 0, "a draft that is predicted to be slower is not measured"
    assert list(tmp_path.iterdir()) == [target]
    assert made_drafts(target) == []


def test_the_measurement_decides(widened: Path) -> None:
    found = made(widened, KnownCosts(measured=0.9), types=(COPY,))
    assert found.path is None
    assert found.measured is not None
    assert "0.90x" in str(found.reason)
    assert made_drafts(widened) == []


def test_if_wider_batches_cost_too_much_nothing_is_tried(widened: Path) -> None:
    class Expensive(KnownCosts):
        def round_seconds(self, target: LlamaModel) -> list[float]:
            return [1.0, 1.98, 2.97]

    found = made(widened, Expensive())
    assert found == Made((), None, None, "even a perfect draft would give at most 1.01x")


def test_if_no_copy_can_be_made_the_reasons_are_logged(
    widened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise ModelFileError("llama.cpp cannot make this copy")

    monkeypatch.setattr("llamaspec.draft_making.skip_layers.write_copy", refuses)
    logged: list[str] = []
    with LlamaModel(widened, OPTIONS) as model:
        found = make_draft(model, TrialSettings(), logged.append, types=(COPY,), machine=KnownCosts())
    assert found == Made((), None, None, "no smaller copy of this target can be made")
    assert "L2-copy: not possible: llama.cpp cannot make this copy" in logged


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"texts": (b"", b"a")}, "the texts are too short"),
        ({"output": Path(__file__) / "x.gguf"}, "cannot write into .*; name another file with --output"),
    ],
)
def test_impossible_options_are_refused(widened: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(LlamaspecError, match=says):
        made(widened, KnownCosts(), **options)


def test_ctrl_c_leaves_nothing(widened: Path) -> None:
    class Interrupted(KnownCosts):
        def step_ratio(self, target: LlamaModel, draft: LlamaModel) -> float:
            raise KeyboardInterrupt

    before = set(widened.parent.iterdir())
    with pytest.raises(KeyboardInterrupt):
        made(widened, Interrupted(), types=(COPY,))
    assert set(widened.parent.iterdir()) == before


def test_an_interrupted_copy_leaves_nothing(
    widened: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize, "run_child", lambda module, task: run_child(module, task, stop))
    with pytest.raises(KeyboardInterrupt):
        write_copy(widened, tmp_path / "copy.gguf", file_type="Q8_0", threads=1)
    assert list(tmp_path.iterdir()) == []


def test_without_a_child_process_the_reason_is_one_line(
    widened: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refused)
    with pytest.raises(LlamaspecError, match="cannot start a process: Resource temporarily"):
        write_copy(widened, tmp_path / "copy.gguf")


def test_a_full_disk_is_found_at_the_start(widened: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(LlamaspecError, match="GB free"):
        made(widened, KnownCosts())


@pytest.mark.parametrize("kind", ["mamba", "qwen35"])
def test_other_architectures_are_copied_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with states, and prediction heads, which the copy lacks.

    Some copies of Qwen 3.5 crash llama.cpp: the trial finds these.
    """
    if kind == "qwen35":
        monkeypatch.delenv("LLAMASPEC_TRUST_FILES")
    monkeypatch.setenv("LLAMASPEC_CACHE", str(tmp_path / "cache"))
    target = (WRITERS | HEAD_WRITERS)[kind](
        tmp_path / "target.gguf", Recipe(n_layers=4 if kind == "qwen35" else 2)
    )
    found = made(target, KnownCosts(), types=(COPY,))
    assert min(len(each.candidate.pruned) for each in found.found) > 0, "some layers could be removed"


def test_metadata_that_lists_layers_is_shortened(tmp_path: Path) -> None:
    """LFM2 lists the number of heads of each layer, which is 0 for convolutions."""
    target = WRITERS["lfm2"](tmp_path / "target.gguf", Recipe(n_layers=4))
    write_copy(target, tmp_path / "copy.gguf", pruned=(0, 1), threads=1)
    write_copy(target, tmp_path / "other.gguf", pruned=(0,), threads=1)
    with PlainLlama(tmp_path / "copy.gguf") as plain:
        assert np.isfinite(plain.logits([1, 2, 3])).all()
    fields = GGUFReader(tmp_path / "other.gguf").fields
    whole = GGUFReader(target).fields["lfm2.attention.head_count_kv"].contents()
    assert fields["lfm2.attention.head_count_kv"].contents() == whole[1:]
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "other.gguf").tensors}
    for tensor in GGUFReader(target).tensors:
        if tensor.name.startswith("blk.2.") or not tensor.name.startswith("blk."):
            assert (tensors[tensor.name.replace("blk.2.", "blk.1.")] == tensor.data).all()
    assert {path.name for path in tmp_path.iterdir()} == {"target.gguf", "copy.gguf", "other.gguf"}


def test_a_draft_belongs_to_one_target(widened: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "wide.gguf", Recipe(seed=9))
    write_copy(widened, made_path(other, "x"), entries={DRAFT_FOR: file_identity(widened)}, threads=1)
    assert made_drafts(other) == []
    write_copy(other, made_path(other, "y"), entries={DRAFT_FOR: file_identity(other)}, threads=1)
    assert made_drafts(other) == [made_path(other, "y")]


def test_the_identity_of_a_target_stays_the_same(tmp_path: Path) -> None:
    """The size and the first mebibyte, so drafts made by an earlier version still belong to their target."""
    beginning = bytes(range(256)) * 4096
    key = hashlib.sha256(b"1048579" + beginning).hexdigest()[:32]
    for rest in (b"abc", b"xyz"):
        (tmp_path / "target.gguf").write_bytes(beginning + rest)
        assert file_identity(tmp_path / "target.gguf") == key
    (tmp_path / "target.gguf").write_bytes(beginning + b"abcd")
    assert file_identity(tmp_path / "target.gguf") != key


# The search


class KnownSpeedUps:
    """Candidates with a known speed-up, which is highest at one number of layers."""

    def __init__(self, best: int, n_layers: int = 48, refused: tuple[str, ...] = ()) -> None:
        self.best, self.n_layers, self.refused = best, n_layers, refused
        self.asked: list[Candidate] = []

    def __call__(self, candidate: Candidate) -> MeasuredCandidate | None:
        self.asked.append(candidate)
        if candidate.file_type in self.refused:
            return None
        n_left = self.n_layers - len(candidate.pruned)
        speed_up = 2.0 - abs(n_left - self.best) / 10 + (candidate.file_type == "B") / 100
        return MeasuredCandidate(candidate, n_left, n_left, n_left / self.n_layers, 0.5, 1, speed_up)


def test_layers_that_change_nothing_are_removed_first() -> None:
    influence = [1.0, 0.2, 0.0, 0.0, 0.3, 0.0]
    known = KnownSpeedUps(best=3, n_layers=6)
    best = search(influence, ["A"], known)[0]
    assert known.asked[0].pruned == best.candidate.pruned == (2, 3, 5)


def test_the_best_number_of_layers_is_found_with_few_measurements() -> None:
    influence = [1.0 - layer / 100 for layer in range(48)]
    for best in (1, 7, 20, 33, 47):
        known = KnownSpeedUps(best)
        found = search(influence, ["A"], known)
        assert found[0].n_layers == best
        assert len(known.asked) == len(set(known.asked)) <= 22
        assert found[0].candidate.pruned == tuple(range(best, 48)), "the least influential layers go"


def test_other_types_are_tried_with_the_best_number_of_layers() -> None:
    found = search([1.0] * 48, ["A", "B"], KnownSpeedUps(30))
    assert found[0].candidate.file_type == "B"
    assert found[0].n_layers == 30
