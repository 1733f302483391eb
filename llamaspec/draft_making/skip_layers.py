"""Makes a draft model from a target by removing layers and bits, as many as is fastest on this machine.

The layers that change their input least are removed first. For each candidate, cost and acceptance are
measured, and the speed-up is predicted. The best one is measured together with its target, and kept if that
beats plain decoding.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamaspec.draft_making.measuring import Machine, Trial, TrialSettings
from llamaspec.errors import EvaluationError, LlamaspecError, MemoryFullError, ModelFileError
from llamaspec.files import file_identity
from llamaspec.llama.gguf_file import read_gguf
from llamaspec.llama.layer_influence import layer_influence
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.quantize import COPY, write_copy
from llamaspec.measure.turns import Spread
from llamaspec.measure.verdict import best_length
from llamaspec.pair import Pair
from llamaspec.plan import DRAFT_FOR, made_path

FIRST = (0.5, 0.75, 0.25, 0.875)  # shares of the layers that the first candidates lack
SILENT = 1e-3  # all first candidates lack the layers that change their input less than this
BITS = {"Q8_0": 8.5, "Q4_0": 4.5, "Q2_K": 3.35}  # types to try, with their approximate bits per weight
FIRST_TYPE = "Q4_0"  # the fastest for its size on most machines
SMALLER = 0.9  # a type is tried if it has at most this share of the target's bits per weight
LEAST_SPEED_UP = 1.02  # minimum speed-up of a draft model that is kept
SEARCHING = 0.5  # share of the time limit after which no candidate is started

Log = Callable[[str], None]  # receives one line of progress


@dataclass(frozen=True, slots=True)
class Candidate:
    """A smaller copy of a target."""

    pruned: tuple[int, ...]  # removed layers, ascending
    file_type: str


@dataclass(frozen=True, slots=True)
class MeasuredCandidate:
    """A candidate, as measured on this machine."""

    candidate: Candidate
    n_layers: int  # remaining layers
    n_bytes: int
    cost_ratio: float  # seconds of a draft step / seconds of a target token
    acceptance: float  # in the target's own completions
    n_guesses: int  # the best constant number of draft tokens
    speed_up: float  # predicted


@dataclass(frozen=True, slots=True)
class Made:
    """The result of a search."""

    found: tuple[MeasuredCandidate, ...]  # the best first
    measured: Spread | None  # speed-up over plain decoding; None = no candidate was promising
    path: Path | None  # of the draft model; None = no candidate is faster
    reason: str | None  # why there is no draft model


def make_draft(
    target: LlamaModel,
    settings: TrialSettings,
    log: Log,
    *,
    types: tuple[str, ...] = (),
    output: Path | None = None,
    machine: Machine | None = None,
) -> Made:
    """Make the fastest draft model from a target, and write it beside the target or to `output`.

    `types` are the types of weights to try; none = those that make the target smaller. LlamaspecError if the
    disk is full, or the texts are too short.
    """
    deadline = time.monotonic() + 60 * settings.minutes * SEARCHING
    folder = (output or made_path(target.path, "made")).parent
    log(f"measuring {target.path.name}: the cost of larger batches, and sample texts")
    trial = Trial(target, settings, machine)
    seconds = trial.round_seconds
    ideal = max((n + 1) * seconds[0] / each for n, each in enumerate(seconds))
    if ideal < LEAST_SPEED_UP:
        return Made((), None, None, f"even a perfect draft would give at most {ideal:.2f}x")
    tokens = trial.sequences[0].tokens
    with Pair(target) as pair:  # because the compute thread must make all evaluations
        influence = pair.call(lambda: layer_influence(target.weights, target.options, tokens))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_disk(target, folder)
        with tempfile.TemporaryDirectory(prefix=".llamaspec-draft-", dir=folder) as unfinished:
            bench = _Bench(trial, len(influence), Path(unfinished), deadline, log)
            found = tuple(search(influence, types or _types(target), bench))
            if not found:
                return Made(found, None, None, "no smaller copy of this target can be made")
            best, label = found[0], bench.label(found[0].candidate)
            if best.speed_up < LEAST_SPEED_UP:
                reason = f"the best one, {label}, is predicted to give {best.speed_up:.2f}x"
                return Made(found, None, None, reason)
            file = bench.path(best.candidate)
            log(f"measuring {label} together with its target")
            measured = trial.speed_up(file)
            if measured.median < LEAST_SPEED_UP:
                return Made(found, measured, None, f"the best one, {label}, gave {measured.median:.2f}x")
            path = output or made_path(target.path, label)
            file.replace(path)
            return Made(found, measured, path, None)
    except OSError as error:
        raise LlamaspecError(
            f"cannot write into {folder}: {error.strerror or error}; name another file with --output"
        ) from error


def search(
    influence: Sequence[float], types: Sequence[str], measure: Callable[[Candidate], MeasuredCandidate | None]
) -> list[MeasuredCandidate]:
    """Measure candidates until no neighbour of the best one is better; return them, the best first.

    `influence` is how much each layer changes its input; 0 = not at all. The search starts with a few numbers
    of layers far apart, and takes smaller and smaller steps from the best one. The other types come last.
    `measure` returns None if llama.cpp cannot use a candidate, or there is no time left.
    """
    found: dict[Candidate, MeasuredCandidate | None] = {}
    least_first = sorted(range(len(influence)), key=lambda layer: (influence[layer], -layer))
    most = len(influence) - 1

    def value(n_pruned: int, file_type: str) -> float:
        candidate = Candidate(tuple(sorted(least_first[:n_pruned])), file_type)
        if candidate not in found:
            found[candidate] = measure(candidate)
        result = found[candidate]
        return 0.0 if result is None else result.speed_up

    n_silent = sum(changes < SILENT for changes in influence)
    first = [n_silent, *(n_silent + round(share * (most - n_silent)) for share in FIRST)]
    best = max((min(n, most) for n in first), key=lambda n: value(n, types[0]))
    step = max(1, round((most - n_silent) / 8))
    while step >= 1:
        near = [n for n in (best - step, best + step) if 0 <= n <= most]
        better = max(near, key=lambda n: value(n, types[0]), default=best)
        if value(better, types[0]) > value(best, types[0]):
            best = better
        else:
            step //= 2
    for file_type in types[1:]:
        value(best, file_type)
    return sorted((result for result in found.values() if result is not None), key=rank)


def rank(found: MeasuredCandidate) -> tuple[float, int]:
    """Return a sort key: the fastest candidate first; of equally fast ones, the smallest."""
    return -found.speed_up, found.n_bytes


@dataclass
class _Bench:
    """Writes and measures candidates; keeps the file of the best one."""

    trial: Trial
    n_layers: int  # without prediction heads
    folder: Path  # for the files of candidates
    deadline: float  # time.monotonic()
    log: Log
    best: MeasuredCandidate | None = None
    longest: float = 0.0  # seconds of the slowest candidate so far

    def __call__(self, candidate: Candidate) -> MeasuredCandidate | None:
        """Measure a candidate; return None if it cannot be used, or there is no time left."""
        start = time.monotonic()
        is_target = not candidate.pruned and candidate.file_type == COPY
        if is_target or (self.longest and start + self.longest > self.deadline):
            return None
        path = self.path(candidate)
        try:
            found = self._measure(candidate, path)
        except (ModelFileError, EvaluationError, MemoryFullError) as error:
            self.log(f"{self.label(candidate)}: not possible: {error}")
            path.unlink(missing_ok=True)
            return None
        finally:
            self.longest = max(self.longest, time.monotonic() - start)
        self.log(
            f"{self.label(candidate)}: {found.n_bytes / 1e6:.0f} MB, a draft token takes "
            f"{found.cost_ratio:.3f} of a target token's time, acceptance {found.acceptance:.2f}, "
            f"predicted {found.speed_up:.2f}x"
        )
        ranked = sorted([self.best, found] if self.best else [found], key=rank)
        self.best = ranked[0]
        for worse in ranked[1:]:
            self.path(worse.candidate).unlink()
        return found

    def path(self, candidate: Candidate) -> Path:
        """Return the file of a candidate."""
        return self.folder / f"{self.label(candidate)}.gguf"

    def label(self, candidate: Candidate) -> str:
        """Return a short name, such as L12-Q4_0."""
        return f"L{self.n_layers - len(candidate.pruned)}-{candidate.file_type}"

    def _measure(self, candidate: Candidate, path: Path) -> MeasuredCandidate:
        seconds = self.trial.round_seconds
        self._write(candidate, path)
        ratio, accepted = self.trial.cost_and_acceptance(path)
        best = best_length([s + n * ratio * seconds[0] for n, s in enumerate(seconds)], accepted, least=1)
        n_left, n_bytes = self.n_layers - len(candidate.pruned), path.stat().st_size
        return MeasuredCandidate(candidate, n_left, n_bytes, ratio, accepted, best.n_guesses, best.speed_up)

    def _write(self, candidate: Candidate, path: Path) -> None:
        """Write the copy without prediction heads, and with correct layer counts in the metadata."""
        target = self.trial.target
        header = read_gguf(target.path)
        entries: dict[str, str | int] = {DRAFT_FOR: file_identity(target.path)}
        name = header.architecture
        pruned = list(candidate.pruned)
        n_heads = header.number("nextn_predict_layers")
        if n_heads:
            entries[f"{name}.nextn_predict_layers"] = 0
            pruned += range(self.n_layers, self.n_layers + n_heads)
        n_dense = header.number("leading_dense_block_count")
        if n_dense:
            entries[f"{name}.leading_dense_block_count"] = n_dense - sum(p < n_dense for p in pruned)
        write_copy(
            target.path,
            path,
            file_type=candidate.file_type,
            pruned=pruned,
            entries=entries,
            threads=target.options.threads,
        )


def _types(target: LlamaModel) -> tuple[str, ...]:
    """Return the types that are smaller than the target's, in the order to try them."""
    facts = target.facts()
    bits = 8 * facts.weights_bytes / facts.n_parameters
    smaller = [name for name, its in BITS.items() if its < SMALLER * bits]
    if FIRST_TYPE in smaller:
        return (FIRST_TYPE, *(name for name in smaller if name != FIRST_TYPE), COPY)
    return (COPY, *smaller)


def _check_disk(target: LlamaModel, folder: Path) -> None:
    """Raise a LlamaspecError if two candidates, each smaller than the target, may not fit on the disk."""
    needed, free = 2 * target.facts().weights_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise LlamaspecError(
            f"{folder} has {free / 1e9:.1f} GB free, but the search needs up to {needed / 1e9:.1f} GB; "
            "name a file on another disk with --output"
        )
