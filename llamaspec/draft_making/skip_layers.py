"""Makes a draft out of a target: with fewer layers and fewer bits, as many as are best on this machine.

Layers go in the order of how little they change. Each candidate copy is written, reads the target's text
along and is timed. The best one is measured together with its target, and kept if it beats plain decoding.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamaspec.draft_making.worth import (
    Machine,
    TrialSettings,
    WrittenText,
    acceptance,
    draft_options,
    write_texts,
)
from llamaspec.errors import EvaluationError, LlamaspecError, MemoryFullError, ModelFileError
from llamaspec.hub import DRAFT_FOR, identity, made_path
from llamaspec.llama.gguf_file import read_gguf
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.quantize import COPY, Copy, layer_influence, write_copy
from llamaspec.measure.probe import Spread
from llamaspec.measure.reasons import best_length
from llamaspec.pair import Pair

FIRST = (0.5, 0.75, 0.25, 0.875)  # shares of the layers that the first copies leave out
SILENT = 1e-3  # a layer that changes less than this is left out before anything else is tried
BITS = {"Q8_0": 8.5, "Q4_0": 4.5, "Q2_K": 3.35}  # of a weight, roughly; the types that are tried
FIRST_TYPE = "Q4_0"  # the fastest for its size on most machines
SMALLER = 0.9  # of the target's bits for each weight: what a type must save to be tried
LEAST_SPEED_UP = 1.02  # anything below does not pay
SEARCHING = 0.5  # part of the time after which no candidate is begun

Tell = Callable[[str], None]  # receives a line for the person


@dataclass(frozen=True, slots=True)
class Candidate:
    """A smaller copy of a target."""

    pruned: tuple[int, ...]  # layers that it lacks, ascending
    file_type: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a candidate is worth here."""

    candidate: Candidate
    n_layers: int  # that are left
    n_bytes: int
    cost_ratio: float  # seconds of a draft step next to one token of the target
    acceptance: float  # of draft tokens, on the target's own texts
    n_guesses: int  # the best constant number of draft tokens
    speed_up: float  # predicted; below 1 it does not pay


@dataclass(frozen=True, slots=True)
class Made:
    """What came of it."""

    found: tuple[Found, ...]  # the best first
    measured: Spread | None  # tokens per second next to plain decoding; None: no candidate was promising
    path: Path | None  # of the draft; None where none pays
    reason: str | None  # why there is none


def make_draft(
    target: LlamaModel,
    settings: TrialSettings,
    tell: Tell,
    *,
    types: tuple[str, ...] = (),
    output: Path | None = None,
    machine: Machine | None = None,
) -> Made:
    """Make the best draft of a target out of the target itself.

    Parameters
    ----------
    tell : callable
        Hears what happens, a line at a time.
    types : tuple of str
        Types of weights to try; none = those that make the target smaller.
    output : Path, optional
        Default: beside the target.

    Raises
    ------
    LlamaspecError
        There is no room on the disk, or a text cannot be used.
    """
    machine = machine or Machine()
    deadline = time.monotonic() + 60 * settings.minutes * SEARCHING
    folder = (output or made_path(target.path, "made")).parent
    prompts = settings.prompts(target)
    tell(f"measuring {target.path.name}: the cost of larger batches, and sample texts")
    seconds = machine.round_seconds(target)
    ideal = max((n + 1) * seconds[0] / each for n, each in enumerate(seconds))
    if ideal < LEAST_SPEED_UP:
        return Made((), None, None, f"here even a perfect draft would give {ideal:.2f}x at most")
    tasks = settings.tasks(prompts, seconds[0])
    texts = write_texts(target, tasks)
    with Pair(target, None, 0.0) as pair:  # only for its thread: that of all other evaluations
        influence = pair.call(lambda: layer_influence(target.weights, target.options, texts[0].tokens))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_disk(target, folder)
        with tempfile.TemporaryDirectory(prefix=".llamaspec-draft-", dir=folder) as unfinished:
            bench = _Bench(
                target, len(influence), texts, seconds, settings, Path(unfinished), machine, deadline, tell
            )
            found = tuple(search(influence, types or _types(target), bench))
            if not found:
                return Made(found, None, None, "no smaller copy of this target can be made")
            best, label = found[0], bench.label(found[0].candidate)
            if best.speed_up < LEAST_SPEED_UP:
                reason = f"the best one, {label}, is predicted to give {best.speed_up:.2f}x"
                return Made(found, None, None, reason)
            file = bench.path(best.candidate)
            tell(f"measuring {label} together with its target")
            measured = machine.speed_up(target, file, tasks)
            if measured.median < LEAST_SPEED_UP:
                return Made(found, measured, None, f"the best one, {label}, gave {measured.median:.2f}x")
            path = output or made_path(target.path, label)
            file.replace(path)
            return Made(found, measured, path, None)
    except OSError as error:
        raise LlamaspecError(
            f"cannot write into {folder}: {error.strerror or error}; name another place with --output"
        ) from error


def search(
    influence: Sequence[float], types: Sequence[str], measure: Callable[[Candidate], Found | None]
) -> list[Found]:
    """Measure candidates until no neighbour of the best is better; those measured, the best first.

    A few numbers of layers far apart come first, then steps from the best one, each half as long as the last;
    then other types.

    Parameters
    ----------
    influence : [n_layers]
        What each layer changes; 0 = nothing.
    types : sequence of str
        The type to begin with, then others.
    measure : callable
        What a candidate is worth; None: llama.cpp cannot use it, or time is up.
    """
    found: dict[Candidate, Found | None] = {}
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


def rank(found: Found) -> tuple[float, int]:
    """The best comes first; of equals the smallest."""
    return -found.speed_up, found.n_bytes


@dataclass
class _Bench:
    """Writes and measures candidates; keeps the file of the best one."""

    target: LlamaModel
    n_layers: int  # without prediction heads
    texts: Sequence[WrittenText]
    round_seconds: Sequence[float]  # [K] of the target's share of a round with K draft tokens
    settings: TrialSettings
    folder: Path  # for files of candidates
    machine: Machine
    deadline: float  # time.monotonic()
    tell: Tell
    best: Found | None = None
    longest: float = 0.0  # seconds of one candidate

    def __call__(self, candidate: Candidate) -> Found | None:
        """What a candidate is worth; None where it cannot be used, or the time is over."""
        start = time.monotonic()
        is_target = not candidate.pruned and candidate.file_type == COPY
        if is_target or (self.longest and start + self.longest > self.deadline):
            return None
        path = self.path(candidate)
        try:
            found = self._measure(candidate, path)
        except (ModelFileError, EvaluationError, MemoryFullError) as error:
            self.tell(f"{self.label(candidate)}: not possible: {error}")
            path.unlink(missing_ok=True)
            return None
        finally:
            self.longest = max(self.longest, time.monotonic() - start)
        self.tell(
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
        """Its file."""
        return self.folder / f"{self.label(candidate)}.gguf"

    def label(self, candidate: Candidate) -> str:
        """A short name: L12-Q4_0."""
        return f"L{self.n_layers - len(candidate.pruned)}-{candidate.file_type}"

    def _measure(self, candidate: Candidate, path: Path) -> Found:
        write_copy(self.target.path, path, self._copy(candidate), self.target.options.threads or 0)
        with LlamaModel(path, draft_options(self.target)) as draft:
            accepted = acceptance(draft, self.texts, self.settings)
            ratio = self.machine.step_ratio(self.target, draft)
        step = ratio * self.round_seconds[0]
        best = best_length([s + n * step for n, s in enumerate(self.round_seconds)], accepted, least=1)
        n_left, n_bytes = self.n_layers - len(candidate.pruned), path.stat().st_size
        return Found(candidate, n_left, n_bytes, ratio, accepted, best.n_guesses, best.speed_up)

    def _copy(self, candidate: Candidate) -> Copy:
        """Without prediction heads, and with the numbers that count layers set right."""
        header = read_gguf(self.target.path)
        numbers, name = {}, header.architecture
        pruned, known = list(candidate.pruned), header.numbers
        n_heads = known.get(f"{name}.nextn_predict_layers", 0)
        if n_heads:
            numbers[f"{name}.nextn_predict_layers"] = 0
            pruned += range(self.n_layers, self.n_layers + n_heads)
        n_dense = known.get(f"{name}.leading_dense_block_count", 0)
        if n_dense:
            numbers[f"{name}.leading_dense_block_count"] = n_dense - sum(p < n_dense for p in pruned)
        return Copy(candidate.file_type, tuple(pruned), {DRAFT_FOR: identity(self.target.path)}, numbers)


def _types(target: LlamaModel) -> tuple[str, ...]:
    """The types that are smaller than the target's, the one to begin with first."""
    facts = target.facts()
    bits = 8 * facts.weights_bytes / facts.n_parameters
    smaller = [name for name, its in BITS.items() if its < SMALLER * bits]
    if FIRST_TYPE in smaller:
        return (FIRST_TYPE, *(name for name in smaller if name != FIRST_TYPE), COPY)
    return (COPY, *smaller)


def _check_disk(target: LlamaModel, folder: Path) -> None:
    """Refuse where a candidate and the best one so far may not fit: both are smaller than it."""
    needed, free = 2 * target.facts().weights_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise LlamaspecError(
            f"{folder} has {free / 1e9:.1f} GB free, the search may need {needed / 1e9:.1f} GB for a while; "
            "name a file on another disk with --output"
        )
