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
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from llamaspec.files import cache_folder, parse_json, read_file, write_file
from llamaspec.length.prior import Gain, LearnedPrior
from llamaspec.llama import resources, runtime
from llamaspec.llama.model import LlamaModel
from llamaspec.pair import Pair
from llamaspec.plan import DraftPlan, ModelFile

if TYPE_CHECKING:
    from llamaspec.measure.probe import Probe

FORMAT = 10  # of the files
LOCK = ".lock"  # a file in their folder, which a process locks while it replaces one of them
PATIENCE = 5.0  # seconds to wait for the lock, which is held for milliseconds
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


_SUFFIXES = {"Probe": "", "LearnedPrior": ".runs", "BenchGains": ".bench"}  # of the files, by class


def ignore_line(line: str) -> None:
    """Notify nobody."""


def stored(pair: Models, kind: type[T], notify: Notify = ignore_line) -> T | None:
    """Return a kept measurement of a pair, or None; `notify` receives a warning if the file is damaged."""
    return _stored(key_of(pair), kind, notify)


def keep(pair: Models, measured: Any, notify: Notify = ignore_line) -> None:
    """Keep a measurement; `notify` receives a warning if the cache folder is not writable."""
    update(key_of(pair), type(measured), lambda _: measured, notify)


def update(key: str, kind: type[T], change: Callable[[T | None], T], notify: Notify = ignore_line) -> None:
    """Replace the kept measurement of a key by what `change` makes of it; it gets None if there is none.

    Meanwhile no other process writes, so no update is lost.
    """
    from filelock import FileLock  # with it comes asyncio, and most runs keep nothing

    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / LOCK, timeout=PATIENCE):
            path = _path(key, _SUFFIXES[kind.__name__])
            write_file(path, json.dumps(asdict(cast(Any, change(_read(path, kind, ignore_line))))))
    except OSError as error:  # a lock that is not given back in time is one, too
        reason = error.strerror or str(error)
        notify(f"cannot write into {folder}: {reason}; set LLAMASPEC_CACHE to another folder")


def key_of(pair: Models) -> str:
    """Return the key of a pair: it depends on everything that changes costs.

    That of an open pair belongs to the files that were opened; that of a plan, to those that lie there now.
    """
    heads = None if pair.heads is None else pair.heads.identity
    key: list[object] = [FORMAT, *map(_model_key, pair.models), heads]
    key += [runtime.backend_description(), platform.node()]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]


def keep_probe(pair: Models, probe: Probe, notify: Notify = ignore_line) -> None:
    """Keep a probe; the next run starts from its costs and from the acceptance that earlier runs observed."""
    keep(pair, probe, notify)
    usual = LearnedPrior(probe.curve)

    def with_costs(earlier: LearnedPrior | None) -> LearnedPrior:
        return replace(earlier or usual, curve=usual.curve, distance=usual.distance)

    update(key_of(pair), LearnedPrior, with_costs)


def keep_gains(key: str, speed_ups: Mapping[str, float]) -> None:
    """Keep the results of a benchmark; other groups of tasks keep their earlier results.

    `key` is that of the pair when the benchmark began. The results count until enough real requests have
    followed, so the gain of earlier requests is dropped.
    """

    def with_groups(earlier: BenchGains | None) -> BenchGains:
        return BenchGains({**(earlier.speed_ups if earlier else {}), **speed_ups})

    update(key, BenchGains, with_groups)
    if _stored(key, LearnedPrior) is not None:
        update(key, LearnedPrior, lambda earlier: replace(earlier or LearnedPrior(), gain=Gain()))


def forget(pair: Models) -> bool:
    """Delete all measurements of a pair; return whether there were any."""
    key = key_of(pair)
    paths = [path for suffix in _SUFFIXES.values() if os.path.lexists(path := _path(key, suffix))]
    for path in paths:
        path.unlink()
    return bool(paths)


def _stored(key: str, kind: type[T], notify: Notify = ignore_line) -> T | None:
    return _read(_path(key, _SUFFIXES[kind.__name__]), kind, notify)


def _read(path: Path, kind: type[T], notify: Notify) -> T | None:
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


def _folder() -> Path:
    return cache_folder() / "curves"


def _path(key: str, suffix: str) -> Path:
    """Return the file of a measurement."""
    return _folder() / f"{key}{suffix}.json"


def _model_key(model: ModelFile | LlamaModel) -> list[object]:
    """Return a key of a model file and of where and how it is computed."""
    threads = model.options.threads or resources.default_threads()
    return [model.identity, threads, *model.options.computing]
