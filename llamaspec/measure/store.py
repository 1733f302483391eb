"""What was measured and learnt of a pair on this machine, kept for later runs, and the length policy from it.

It lies in the user's cache folder. A file that is damaged or foreign counts as none, with a reason, and is
replaced by the next write; one of another version counts as none silently.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from llamaspec.errors import LlamaspecError
from llamaspec.files import cache_folder, parse_json, read_beginning, read_file, write_file
from llamaspec.length.costs import CostCurve
from llamaspec.length.policy import AutoLength, LearnedPrior
from llamaspec.llama import runtime
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import ModelOptions
from llamaspec.measure.probe import Probe, exact_widths
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.sequence_drafters import CascadeLevel

FORMAT = 2  # of probes
PRIOR_FORMAT = 7  # of learned priors
HASHED_BYTES = 1 << 20  # of the beginning of a model file: its metadata
WORTH_KEEPING = 64  # tokens of which a run has learnt something
_MAX_BYTES = 4 << 20

Tell = Callable[[str], None]  # receives a remark for the person

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that is not loaded."""

    path: Path
    options: ModelOptions


@dataclass(frozen=True, slots=True)
class PairFiles:
    """A target and perhaps a draft that are not loaded."""

    target: ModelFile
    draft: ModelFile | None
    stages: tuple[ModelFile, ...] = ()  # the draft's draft, and so on
    ngram: bool = False  # draft tokens are looked up in earlier text
    heads: bool = False  # the target's own prediction heads draft

    @property
    def draft_models(self) -> tuple[ModelFile, ...]:
        """The draft, the draft's draft, and so on."""
        return self.stages if self.draft is None else (self.draft, *self.stages)

    @property
    def drafts(self) -> bool:
        """Whether anything drafts."""
        return self.draft is not None or self.ngram or self.heads


ModelOnDisk: TypeAlias = (
    ModelFile | LlamaModel
)  # a model file and the way it is loaded; it need not be loaded
PairOnDisk: TypeAlias = PairFiles | Pair | CascadeLevel  # what names a pair


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """What the store holds, or why what lies there counts as nothing; neither where nothing is."""

    value: T | None = None
    fault: str | None = None  # one line


@dataclass(frozen=True, slots=True)
class _Version:
    format: int


@dataclass(frozen=True, slots=True)
class _ProbeFile:
    format: int
    probe: Probe


@dataclass(frozen=True, slots=True)
class _PriorFile:
    format: int
    experience: LearnedPrior


def stored_probe(pair: PairOnDisk) -> Kept[Probe]:
    """What was found for this pair on this machine."""
    found = _read(_probe_path(pair), _ProbeFile, FORMAT)
    return Kept(found.value.probe if found.value is not None else None, found.fault)


def store_probe(pair: PairOnDisk, probe: Probe) -> Path:
    """Keep a probe.

    Raises
    ------
    LlamaspecError
        The cache folder cannot be written.
    """
    path = _probe_path(pair)
    try:
        _write(path, _ProbeFile(FORMAT, probe))
        _write(_prior_path(pair), _PriorFile(PRIOR_FORMAT, LearnedPrior(probe.curve)))
    except OSError as error:
        raise LlamaspecError(
            f"cannot write {path}: {error.strerror}; set LLAMASPEC_CACHE elsewhere"
        ) from error
    return path


def stored_prior(pair: PairOnDisk) -> Kept[LearnedPrior]:
    """What a probe has found and earlier runs have learnt since, however attention is computed."""
    found = _read(_prior_path(pair), _PriorFile, PRIOR_FORMAT)
    return Kept(found.value.experience if found.value is not None else None, found.fault)


def store_prior(pair: PairOnDisk, prior: LearnedPrior) -> None:
    """Keep what a run has learnt, if it can be kept."""
    with suppress(OSError):  # the text is what people came for
        _write(_prior_path(pair), _PriorFile(PRIOR_FORMAT, prior))


def forget(pair: PairOnDisk) -> bool:
    """Drop what is kept; answers whether there was anything."""
    paths = [path for path in (_probe_path(pair), _prior_path(pair)) if os.path.lexists(path)]
    for path in paths:
        path.unlink()
    return bool(paths)


def auto_length(
    pair: Pair, widths: frozenset[int] | None = None, tell: Tell | None = None, *, trees: bool = False
) -> AutoLength:
    """A fresh policy; with `widths` it allows no others. `tell` hears of stored files that are damaged.

    The pair's drafts that have drafts get one, too.
    """
    for level in pair.cascade:
        level.length = _begun(level, None, tell)
    return _begun(pair, widths, tell, trees=trees)


def _begun(
    pair: Pair | CascadeLevel, widths: frozenset[int] | None, tell: Tell | None, *, trees: bool = False
) -> AutoLength:
    kept = stored_prior(pair)
    if kept.fault is not None and tell is not None:
        tell(kept.fault)
    return AutoLength(kept.value, widths, sources=pair.sources, trees=trees)


def known_exact_widths(pair: Pair) -> frozenset[int]:
    """Batch widths that are bit-identical with width 1: as a probe has found, or found now."""
    known = stored_probe(pair).value
    return known.identical_widths if known is not None else exact_widths(pair)


def learned_costs(policy: AutoLength) -> CostCurve | None:
    """What a policy knows of this pair's costs."""
    return policy.experience().curve


def keep_prior(pair: Pair | CascadeLevel, policy: LengthPolicy) -> None:
    """Keep what a run has learnt about this pair, if it was long enough to learn something."""
    if isinstance(policy, AutoLength) and policy.n_tokens >= WORTH_KEEPING:
        store_prior(pair, policy.experience())
    if isinstance(pair, Pair):
        for level in pair.cascade:
            keep_prior(level, level.length)


def _read(path: Path, kind: type[T], version: int) -> Kept[T]:
    try:
        content = read_file(path, _MAX_BYTES)
        if parse_json(_Version, content, unknown="ignore").format != version:
            return Kept()
        return Kept(parse_json(kind, content))
    except FileNotFoundError:
        return Kept()
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = str(error)
    return Kept(fault=f"{path} counts as empty, it cannot be used: {reason}")


def _write(path: Path, content: _ProbeFile | _PriorFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(asdict(content)))


def _prior_path(pair: PairOnDisk) -> Path:
    return _curve_path(pair, with_memory=False).with_suffix(".runs.json")


def _probe_path(pair: PairOnDisk) -> Path:
    return _curve_path(pair, with_memory=True)


def _curve_path(pair: PairOnDisk, *, with_memory: bool) -> Path:
    """Of what belongs to a pair, and perhaps to the way in which attention is computed."""
    models = [_model_key(model) for model in (pair.target, *pair.draft_models)]
    memory = [_memory_key(model.options) for model in (pair.target, *pair.draft_models) if with_memory]
    heads = ["heads"] if pair.heads else []
    key = json.dumps([*models, *memory, *heads, runtime.backend_description(), platform.node()])
    return cache_folder() / "curves" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _model_key(model: ModelOnDisk) -> list[object]:
    """What tells a model file and where it computes from others."""
    beginning = hashlib.sha256(read_beginning(model.path, HASHED_BYTES)).hexdigest()
    options = model.options
    threads = options.threads or runtime.default_threads()
    placement = [options.gpu_layers, threads, options.repack, *options.placement]
    return [model.path.stat().st_size, beginning, *placement]


def _memory_key(options: ModelOptions) -> list[str | None]:
    """How attention is computed, on which the bits of an evaluation depend."""
    return [options.flash_attention, options.cache_type_k, options.cache_type_v]
