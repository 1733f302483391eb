"""Keeps what the probe found and what runs have learnt, for the same pair on the same machine.

They lie in the user's cache folder. A file that is damaged, or of another version, counts as
none: the probe can always be run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from platformdirs import user_cache_dir

from llamaspec.app.measure import CatchUp, Probe, Timing, WidthTiming
from llamaspec.errors import LlamaspecError
from llamaspec.llama import runtime
from llamaspec.llama.options import ModelOptions
from llamaspec.rules.auto_length import Experience
from llamaspec.rules.costs import CostBelief

FORMAT = 2
HASHED_BYTES = 1 << 20  # of the beginning of a model file: its metadata


class ModelOnDisk(Protocol):
    """A model file and the way it is loaded; it need not be loaded."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def options(self) -> ModelOptions:
        """How it is loaded."""


class PairOnDisk(Protocol):
    """What names a pair; a `Pair` does."""

    @property
    def target(self) -> ModelOnDisk:
        """The target."""

    @property
    def draft(self) -> ModelOnDisk | None:
        """The draft, if there is one."""


def stored(pair: PairOnDisk) -> Probe | None:
    """What was found for this pair on this machine, or None."""
    try:
        found = json.loads(_path(pair).read_text(encoding="utf-8"))
        return _probe(found["probe"]) if found["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(pair: PairOnDisk, probe: Probe) -> Path:
    """Keep a probe.

    Raises
    ------
    LlamaspecError
        The cache folder cannot be written.
    """
    path = _path(pair)
    try:
        _write(path, {"probe": asdict(probe)})
        _experience_path(pair).unlink(missing_ok=True)  # it is older
    except OSError as error:
        raise LlamaspecError(
            f"cannot write {path}: {error.strerror}; set LLAMASPEC_CACHE elsewhere"
        ) from error
    return path


def stored_experience(pair: PairOnDisk) -> Experience | None:
    """What earlier runs have learnt since the last probe, or None."""
    try:
        found = json.loads(_experience_path(pair).read_text(encoding="utf-8"))
        return _experience(found["experience"]) if found["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_experience(pair: PairOnDisk, experience: Experience) -> None:
    """Keep what a run has learnt, if it can be kept."""
    with suppress(OSError):  # the text is what people came for
        _write(_experience_path(pair), {"experience": asdict(experience)})


def forget(pair: PairOnDisk) -> bool:
    """Drop what is kept; answers whether there was anything."""
    paths = [path for path in (_path(pair), _experience_path(pair)) if path.exists()]
    for path in paths:
        path.unlink()
    return bool(paths)


def _write(path: Path, content: dict[str, object]) -> None:
    """In one step: a reader finds the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps({"format": FORMAT, **content}), encoding="utf-8")
    unfinished.replace(path)


def _experience_path(pair: PairOnDisk) -> Path:
    return _path(pair).with_suffix(".runs.json")


def _path(pair: PairOnDisk) -> Path:
    folder = os.environ.get("LLAMASPEC_CACHE") or user_cache_dir("llamaspec", appauthor=False)
    models = [_model_key(model) for model in (pair.target, pair.draft) if model is not None]
    key = json.dumps([*models, runtime.backend_description(), platform.node()])
    return Path(folder) / "curves" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _model_key(model: ModelOnDisk) -> list[object]:
    """What tells a model file and the way it is loaded from others."""
    with model.path.open("rb") as file:
        beginning = hashlib.sha256(file.read(HASHED_BYTES)).hexdigest()
    options = model.options
    placement = [options.gpu_layers, options.threads or runtime.default_threads(), options.repack]
    memory = [options.flash_attention, options.cache_type_k, options.cache_type_v]
    return [model.path.stat().st_size, beginning, *placement, *memory]


def _experience(found: dict[str, object]) -> Experience:
    costs = found["costs"]
    belief = CostBelief(
        log_seconds=tuple(costs["log_seconds"]),  # type: ignore[index]
        covariance=tuple(map(tuple, costs["covariance"])),  # type: ignore[index]
        catch_up=tuple(costs["catch_up"]),  # type: ignore[index]
    )
    levels: tuple[float, ...] = tuple(found["confidence_levels"])  # type: ignore[arg-type]
    return Experience(belief, float(found["acceptance"]), levels)  # type: ignore[arg-type]


def _probe(found: dict[str, object]) -> Probe:
    widths = [
        WidthTiming(**{**w, "timings": tuple(Timing(**t) for t in w["timings"])})
        for w in found["widths"]  # type: ignore[attr-defined]
    ]
    step = found["draft_step"]
    return Probe(
        depths=tuple(found["depths"]),  # type: ignore[arg-type]
        left_out_depths=tuple(found["left_out_depths"]),  # type: ignore[arg-type]
        widths=tuple(widths),
        draft_step=Timing(**step) if step else None,  # type: ignore[arg-type]
        catch_ups=tuple(CatchUp(**c) for c in found["catch_ups"]),  # type: ignore[attr-defined]
        sampling_seconds=float(found["sampling_seconds"]),  # type: ignore[arg-type]
    )
