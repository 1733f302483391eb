"""A trial of a model file in a child process, the first time that llamaspec opens it.

Some damaged files make llama.cpp abort, hang or take all memory, and checks of the metadata cannot find them
all. So a child process with limited memory and time uses the file first; if that fails, an error says why.
The child evaluates some tokens. Of a large file it reads only metadata and vocabulary, so that the weights
are read only once. A draft that reads hidden rows is tried with its target, because llama.cpp may also abort
if two good files do not fit each other. What passed is recorded by size, time and beginning of the files, and
not tried again. The child runs `trial_child.py`, by name: it opens models, which needs this module.
tests/llama/test_trial.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from llamaspec.errors import MemoryFullError, ModelFileError, PairError
from llamaspec.files import cache_folder, file_identity, write_file
from llamaspec.kernels import AUTO, OFF, VARIABLE, library
from llamaspec.llama.gguf_file import check_metadata, file_parts
from llamaspec.llama.options import DEFAULT_CONTEXT
from llamaspec.llama.resources import available_bytes

if TYPE_CHECKING:
    from llamaspec.llama.child import Outcome

CHILD = "llamaspec.llama.trial_child"
TRUST = "LLAMASPEC_TRUST_FILES"  # environment variable: open every file without a trial

LARGE_BYTES = 2 << 30  # larger files are tried without their weights: a SATA SSD reads this in four seconds
CPU_SECONDS = 15  # limit for a small file
BYTES_PER_CPU_SECOND = 100_000_000  # one thread evaluates a token faster than this
WALL_SECONDS = 120.0  # limit for a small file on a busy machine
BYTES_PER_SECOND = 10e6  # of a slow disk
SPARE_BYTES = 2 << 30  # limit of memory for contexts and buffers, besides the size of the file
_REMEDY = f"download or convert it again, or set {TRUST}=1 if you trust it"
_PAIR_REMEDY = f"name its own target, or set {TRUST}=1 if you trust it"
_SUPPLIED = Path(__file__).resolve().parent.parent / "demo"  # models that come with llamaspec

OnWait = Callable[[float], None]  # called with 0.0 repeatedly


@dataclass(frozen=True, slots=True)
class FileKeys:
    """The keys of a model file that is opened, made once: later, another file may lie at its path.

    Raises
    ------
    ModelFileError
        The file, or another part of the model, cannot be read.
    """

    identity: str  # of its first part, in any folder: for measurements, and drafts that are made for it
    release: str  # with the latest change of each part and the release of llama.cpp: for trials and prefixes

    @classmethod
    def of(cls, path: Path) -> FileKeys:
        """Return the keys of the file that lies at a path now."""
        release = hashlib.sha256(version("llama-cpp-python").encode())
        try:
            for part in file_parts(path):
                release.update(f"{part.stat().st_mtime_ns} {file_identity(part)}\n".encode())
            return cls(file_identity(path), release.hexdigest()[:32])
        except OSError as error:
            raise ModelFileError(f"cannot read {path}: {error.strerror}; name a readable file") from error


def ensure_tried(path: Path, n_ctx: int | None = None, on_wait: OnWait | None = None) -> FileKeys:
    """Try a file whose header has been checked, unless it is trusted or has passed before; return its keys.

    The trial's context is not larger than `n_ctx`. `on_wait` is called while the trial runs; an exception
    there ends it.

    Raises
    ------
    ModelFileError
        The metadata is impossible; or llama.cpp crashes, hangs, needs too much memory or refuses the file.
    MemoryFullError
        The machine has no room for the model.
    """
    keys = FileKeys.of(path)
    if _is_trusted(path) or _has_passed(record := _record(keys)):
        return keys
    check_metadata(path)
    reads_weights = _n_bytes(path) <= min(LARGE_BYTES, available_bytes())
    check_outcome(path, _try([path], n_ctx, on_wait, reads_weights=reads_weights))
    _keep(record, path)
    return keys


def ensure_pair_tried(
    target: Path, draft: Path, n_ctx: int | None = None, on_wait: OnWait | None = None
) -> None:
    """Try a draft alone, and then with the target whose hidden rows it reads, which has been tried.

    Pairs are not tried if they are trusted, large, or have passed before. Parameters as for `ensure_tried`.

    Raises
    ------
    PairError
        llama.cpp crashes, hangs, needs too much memory or fails when it drafts for this target.
    ModelFileError, MemoryFullError
        As for `ensure_tried`.
    """
    keys = ensure_tried(draft, n_ctx, on_wait)
    n_bytes = _n_bytes(target) + _n_bytes(draft)
    if _is_trusted(draft) or n_bytes > min(LARGE_BYTES, available_bytes()):
        return
    if _has_passed(record := _record(FileKeys.of(target), keys)):
        return
    outcome = _try([target, draft], n_ctx, on_wait, reads_weights=True)
    try:
        check_outcome(
            f"{draft}, drafting for {target},", outcome, "it was made for another target", _PAIR_REMEDY
        )
    except ModelFileError as error:
        raise PairError(str(error)) from error
    _keep(record, target, draft)


def _is_trusted(path: Path) -> bool:
    return os.environ.get(TRUST, "0") not in ("", "0") or path.resolve().parent == _SUPPLIED


def _record(*files: FileKeys) -> Path:
    """Return the file that records that these files have passed a trial together."""
    # With the version, because its checks of the metadata may be new.
    names = [each.release for each in files]
    return cache_folder() / "tried" / "-".join([*names, version("llamaspec")])


def _has_passed(record: Path) -> bool:
    with suppress(OSError):  # the folder may not be searched
        return record.is_file()
    return False


def _keep(record: Path, *paths: Path) -> None:
    with suppress(OSError):  # then the files are tried again next time
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(record, json.dumps([*map(str, paths)]) + "\n")


def _n_bytes(path: Path) -> int:
    return sum(part.stat().st_size for part in file_parts(path))


def _try(
    paths: Sequence[Path], n_ctx: int | None, on_wait: OnWait | None, *, reads_weights: bool
) -> Outcome | None:
    """Use a model, or a target and its draft, in a child process; return how it ended."""
    from llamaspec.llama.child import run_child

    n_bytes = sum(map(_n_bytes, paths)) if reads_weights else 0
    limits = (CPU_SECONDS + n_bytes // BYTES_PER_CPU_SECOND, SPARE_BYTES + n_bytes)
    n_ctx = n_ctx if n_ctx is not None and n_ctx < DEFAULT_CONTEXT else 0
    settings = [*limits, n_ctx, int(reads_weights), *(path.absolute() for path in paths)]
    environment = {
        TRUST: "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        VARIABLE: OFF if library.facts.level is None else AUTO,  # an option may have switched them off
        # The limit of memory would include GPU buffers, and the trial needs no GPU.
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }
    wait = None if on_wait is None else partial(on_wait, 0.0)
    seconds = WALL_SECONDS + n_bytes / BYTES_PER_SECOND
    try:
        return run_child(CHILD, [*map(str, settings)], wait, seconds, environment)
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"cannot try {paths[-1]} in a child process: {error}; set {TRUST}=1 if you trust it"
        ) from error


def check_outcome(
    tried: Path | str,
    outcome: Outcome | None,
    cause: str = "it is damaged or hostile",
    remedy: str = _REMEDY,
) -> None:
    """Raise the error that the child reported, or one for its crash; None = the child took too long."""
    if outcome is None or outcome.code == -signal.SIGXCPU:
        raise ModelFileError(f"{tried} keeps llama.cpp busy without end; {remedy}")
    code = outcome.code
    if code == -signal.SIGINT:
        raise KeyboardInterrupt
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        raise ModelFileError(f"{tried} crashes llama.cpp ({name}): {cause}; {remedy}")
    kind, message = "no answer", f"the trial of {tried} failed (exit code {code}); {remedy}"
    if code == 0:
        with suppress(ValueError, TypeError, RecursionError):
            kind, message = map(str, json.loads(outcome.answer))
    if kind == "memory":
        raise ModelFileError(f"{tried} needs more memory than a file of its size should; {remedy}")
    if kind:
        raise MemoryFullError(message) if kind == "MemoryFullError" else ModelFileError(message)
