"""Measurements of a pair on this machine, and what runs have learnt about it, kept between runs.

Each kind has a file of its own in the user's cache folder. A damaged file is ignored with a warning, and the
next write replaces it. Another format has other file names.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from llamaspec.files import cache_folder, file_identity, parse_json, read_file, write_file
from llamaspec.length.policy import LearnedPrior
from llamaspec.llama import resources, runtime
from llamaspec.llama.model import LlamaModel
from llamaspec.measure.probe import Probe
from llamaspec.pair import Pair
from llamaspec.plan import DraftPlan, ModelFile

FORMAT = 9  # of the files
_MAX_BYTES = 4 << 20

T = TypeVar("T")
Models: TypeAlias = DraftPlan | Pair  # `models` of each: the target and its draft model
Notify: TypeAlias = Callable[[str], object]  # receives one line


@dataclass(frozen=True, slots=True)
class BenchGains:
    """Speed-ups of a pair over plain decoding, from its latest benchmarks; ValueError if there are none."""

    speed_ups: dict[str, float]  # by group of tasks

    def __post_init__(self) -> None:
        if not self.speed_ups or not all(1e-3 < each < 1e3 for each in self.speed_ups.values()):
            raise ValueError("speed-ups must be from 0.001 to 1000, at least one")


_SUFFIXES: dict[type[object], str] = {
    Probe: "",
    LearnedPrior: ".runs",
    BenchGains: ".bench",
}


def _ignore(line: str) -> None: ...


def stored(pair: Models, kind: type[T], notify: Notify = _ignore) -> T | None:
    """Return a kept measurement of a pair, or None; `notify` receives a warning if the file is damaged."""
    path = _path(pair, kind)
    try:
        return parse_json(kind, read_file(path, _MAX_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = str(error)
    notify(f"ignoring {path}, which cannot be used: {reason}")
    return None


def keep(pair: Models, measured: Any, notify: Notify = _ignore) -> None:
    """Keep a measurement; `notify` receives a warning if the cache folder is not writable."""
    path = _path(pair, type(measured))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(asdict(measured)))
    except OSError as error:
        notify(f"cannot write {path}: {error.strerror}; set LLAMASPEC_CACHE to another folder")


def keep_probe(pair: Models, probe: Probe, notify: Notify = _ignore) -> None:
    """Keep a probe; the next run starts from its costs and from the acceptance that earlier runs observed."""
    keep(pair, probe, notify)
    earlier = stored(pair, LearnedPrior) or LearnedPrior()
    usual = LearnedPrior(probe.curve)
    keep(pair, replace(earlier, curve=probe.curve, distance=usual.distance))


def keep_gains(pair: Models, speed_ups: Mapping[str, float]) -> None:
    """Keep the results of a benchmark; other groups of tasks keep their earlier results."""
    earlier = stored(pair, BenchGains)
    keep(pair, BenchGains({**(earlier.speed_ups if earlier else {}), **speed_ups}))


def forget(pair: Models) -> bool:
    """Delete all measurements of a pair; return whether there were any."""
    paths = [path for kind in _SUFFIXES if os.path.lexists(path := _path(pair, kind))]
    for path in paths:
        path.unlink()
    return bool(paths)


def _path(pair: Models, kind: type[object]) -> Path:
    """Return the file of a measurement.

    A probe also depends on the kind of attention and the types of the KV cache; a prior serves all of them.
    """
    models = pair.models
    key: list[object] = [FORMAT, *(_model_key(model) for model in models), models[0].options.heads]
    if kind is Probe:
        options = [model.options for model in models]
        key += [[each.flash_attention, each.cache_type_k, each.cache_type_v] for each in options]
    key += [runtime.backend_description(), platform.node()]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    return cache_folder() / "curves" / f"{name}{_SUFFIXES[kind]}.json"


def _model_key(model: ModelFile | LlamaModel) -> list[object]:
    """Return a key of a model file and of where and how it is computed."""
    options = model.options
    threads = options.threads or resources.default_threads()
    placement = [options.gpu_layers, threads, options.repack, *options.placement]
    return [file_identity(model.path), *placement]
