"""What was measured and learnt of a pair on this machine, kept for later runs, and the length policy from it.

It lies in the user's cache folder. A file that is damaged or foreign counts as none, with a reason, and is
replaced by the next write. Another version has other file names.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from llamaspec.errors import LlamaspecError
from llamaspec.files import cache_folder, file_identity, parse_json, read_file, write_file
from llamaspec.length.acceptance import LearnedPrior
from llamaspec.length.policy import AutoLength
from llamaspec.llama import runtime
from llamaspec.llama.model import LlamaModel
from llamaspec.measure.exactness import Exactness, find_exactness
from llamaspec.measure.probe import Probe, time_draft_step
from llamaspec.pair import Pair
from llamaspec.plan import DraftPlan, ModelFile
from llamaspec.protocols import LengthPolicy
from llamaspec.sequence_drafters import Stage
from llamaspec.values import Source

FORMAT = 8  # of what is kept
WORTH_KEEPING = 64  # tokens of which a run has learnt something
_MAX_BYTES = 4 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadingGain:
    """How many times as fast long prompts are read with the weights as they lie in the file."""

    gain: float


@dataclass(frozen=True, slots=True)
class BenchGains:
    """Results of the latest benchmarks of a pair, over plain decoding.

    Raises
    ------
    ValueError
        There is no result, or one that cannot have been measured.
    """

    speed_ups: dict[str, float]  # by group of tasks

    def __post_init__(self) -> None:
        if not self.speed_ups or not all(1e-3 < each < 1e3 for each in self.speed_ups.values()):
            raise ValueError("a benchmark of another kind")


PairOnDisk: TypeAlias = DraftPlan | Pair  # what names a pair
Measured: TypeAlias = Probe | LearnedPrior | ReadingGain | Exactness | BenchGains
_SUFFIXES: dict[type[object], str] = {
    Probe: "",
    LearnedPrior: ".runs",
    ReadingGain: ".reading",
    Exactness: ".exact",
    BenchGains: ".bench",
}


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """What the store holds, or why what lies there counts as nothing; neither where nothing is."""

    value: T | None = None
    fault: str | None = None  # one line


def stored(pair: PairOnDisk, kind: type[T]) -> Kept[T]:
    """Return what is kept of a pair. A prior is kept for every way to compute attention."""
    return _read(_path(pair, kind), kind)


def keep(pair: PairOnDisk, measured: Measured) -> None:
    """Keep a measurement, if the cache folder can be written: it is not what people came for."""
    with suppress(OSError):
        _write(_path(pair, type(measured)), measured)


def store_probe(pair: PairOnDisk, probe: Probe) -> Path:
    """Keep a probe.

    Raises
    ------
    LlamaspecError
        The cache folder cannot be written.
    """
    path = _path(pair, Probe)
    try:
        _write(path, probe)
        _write(_path(pair, LearnedPrior), LearnedPrior(probe.curve))
    except OSError as error:
        raise LlamaspecError(
            f"cannot write {path}: {error.strerror}; set LLAMASPEC_CACHE elsewhere"
        ) from error
    return path


def prior_with_target(pair: PairOnDisk, target: Path) -> LearnedPrior:
    """Return what is kept of the same drafts with another file as their target."""
    mine, *drafts = pair.models
    path = _path_of([ModelFile(target, mine.options), *drafts], pair.heads is not None, LearnedPrior)
    return _read(path, LearnedPrior).value or LearnedPrior()


def keep_gains(pair: PairOnDisk, speed_ups: Mapping[str, float]) -> None:
    """Keep the results of a benchmark; other groups of tasks keep theirs."""
    earlier = stored(pair, BenchGains).value
    keep(pair, BenchGains({**(earlier.speed_ups if earlier else {}), **speed_ups}))


def forget(pair: PairOnDisk) -> bool:
    """Drop what is kept; answers whether there was anything."""
    paths = [path for kind in _SUFFIXES if os.path.lexists(path := _path(pair, kind))]
    for path in paths:
        path.unlink()
    return bool(paths)


def auto_length(
    pair: Pair,
    widths: frozenset[int] | None = None,
    tell: Callable[[str], None] = lambda fault: None,
    *,
    trees: bool = False,
) -> AutoLength:
    """A fresh policy; with `widths` it allows no others. `tell` hears of stored files that are damaged.

    The pair's drafts that have drafts get one, too. In the first runs of a pair a draft step is timed.
    """

    def usable(kept: Kept[LearnedPrior]) -> LearnedPrior | None:
        if kept.fault is not None:
            tell(kept.fault)
        return kept.value

    pads = not pair.target.keeps_states
    for stage in pair.stages:
        prior = usable(_read(_path_of_stage(stage), LearnedPrior))
        stage.length = AutoLength(prior, sources=stage.sources, pads=pads)
    prior = usable(stored(pair, LearnedPrior))
    policy = AutoLength(prior, widths, sources=pair.sources, trees=trees, pads=pads)
    if Source.MODEL in pair.sources and not (policy.is_settled and policy.costs.knows_step):
        with suppress(LlamaspecError):  # a draft that fails says so when it is used
            policy.costs.observe_first_step(time_draft_step(pair))
    return policy


def known_exactness(pair: Pair, tell: Callable[[str], None] = lambda notice: None) -> Exactness:
    """Which evaluations have the bits of single positions: as found earlier, or found now and kept."""
    known = stored(pair, Exactness).value
    if known is None:
        tell("--exact: comparing the numbers of all batch widths, once for a pair on a machine")
        known = find_exactness(pair)
        if known.is_whole:  # else the machine was busy
            keep(pair, known)
    return known


def restore_reading_gain(pair: Pair) -> None:
    """Let a pair know what was measured of reading its prompts on this machine."""
    kept, reader = stored(pair, ReadingGain).value, pair.target.reader
    if kept is not None and reader is not None:
        reader.gain = kept.gain


def keep_learnt(pair: Pair, policy: LengthPolicy) -> None:
    """Keep what a run has learnt of a pair and its stages, if it was long enough, and of reading prompts."""
    reader = pair.target.reader
    if reader is not None and reader.gain is not None:
        keep(pair, ReadingGain(reader.gain))
    kept = [(_path(pair, LearnedPrior), policy)]
    kept += [(_path_of_stage(stage), stage.length) for stage in pair.stages]
    for path, learned in kept:
        if isinstance(learned, AutoLength) and learned.n_tokens >= WORTH_KEEPING:
            with suppress(OSError):
                _write(path, learned.experience())


def _read(path: Path, kind: type[T]) -> Kept[T]:
    try:
        return Kept(parse_json(kind, read_file(path, _MAX_BYTES)))
    except FileNotFoundError:
        return Kept()
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = str(error)
    return Kept(fault=f"{path} counts as empty, it cannot be used: {reason}")


def _write(path: Path, content: Measured) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(asdict(content)))


def _path(pair: PairOnDisk, kind: type[object]) -> Path:
    """The file of a pair's measurements; those of reading prompts belong to its target alone."""
    return _path_of(pair.models[:1] if kind is ReadingGain else pair.models, pair.heads is not None, kind)


def _path_of_stage(stage: Stage) -> Path:
    return _path_of(stage.models, False, LearnedPrior)


def _path_of(models: Sequence[ModelFile | LlamaModel], has_heads: bool, kind: type[object]) -> Path:
    """Timings and bits also depend on how attention is computed."""
    key: list[object] = [FORMAT, *(_model_key(model) for model in models), has_heads]
    if kind in (Probe, Exactness):
        options = [model.options for model in models]
        key += [[each.flash_attention, each.cache_type_k, each.cache_type_v] for each in options]
    key += [runtime.backend_description(), platform.node()]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    return cache_folder() / "curves" / f"{name}{_SUFFIXES[kind]}.json"


def _model_key(model: ModelFile | LlamaModel) -> list[object]:
    """What tells a model file and where it computes from others."""
    options = model.options
    threads = options.threads or runtime.default_threads()
    placement = [options.gpu_layers, threads, options.repack, *options.placement]
    return [file_identity(model.path), *placement]
