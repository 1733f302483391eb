"""A child process opens a model file that llamaspec has not opened before.

Some damaged files make llama.cpp abort, hang or take all memory, and our own checks cannot know them all.
So a child process with limited memory and time tries the file first (`llama/trial_child.py`); if the child
fails, one error says why. The child evaluates some tokens. Of a large file it reads only metadata and
vocabulary, so that the weights are not read twice. Files that passed are remembered by size, time and
beginning, and are not tried again. tests/llama/test_trial.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

from llamaspec.errors import MemoryFullError, ModelFileError
from llamaspec.files import cache_folder, file_identity, write_file
from llamaspec.llama.child import Outcome, run_child
from llamaspec.llama.gguf_file import check_metadata, file_parts
from llamaspec.llama.options import DEFAULT_CONTEXT
from llamaspec.llama.runtime import available_bytes

TRUST = "LLAMASPEC_TRUST_FILES"  # environment variable: open every file without a trial

LARGE_BYTES = 2 << 30  # of a file whose weights are not read: a SATA SSD takes four seconds for as many
CPU_SECONDS = 15  # for a small file
BYTES_PER_CPU_SECOND = 100_000_000  # one thread evaluates a token faster than that
WALL_SECONDS = 120.0  # for a small file, on a machine that does much else
BYTES_PER_SECOND = 10e6  # a slow disk
SPARE_BYTES = 2 << 30  # of memory, besides as much as the file has: contexts, buffers
_N_REMEMBERED = 1000  # files
_REMEDY = f"download or convert it again, or set {TRUST}=1 if you are sure of it"
_CHILD = "llamaspec.llama.trial_child"
_SUPPLIED = Path(__file__).resolve().parent.parent / "demo"  # models that come with llamaspec

OnWait = Callable[[float], None]  # called with 0.0 again and again


def ensure_tried(path: Path, n_ctx: int | None = None, on_wait: OnWait | None = None) -> None:
    """Try a file, whose header has been checked, unless it is trusted or has passed before.

    The trial opens no larger context than the caller wants. `on_wait` is called while it runs; an exception
    there ends it.

    Raises
    ------
    ModelFileError
        The metadata is impossible; or llama.cpp crashes, hangs, needs too much memory or refuses the file.
    MemoryFullError
        The machine has no room for it.
    """
    if os.environ.get(TRUST, "0") not in ("", "0") or path.resolve().parent == _SUPPLIED:
        return
    try:
        record = cache_folder() / "tried" / release_key(path)
    except OSError as error:  # of another part of the file
        raise ModelFileError(f"cannot read {path}: {error.strerror}; name a readable file") from error
    if record.is_file():
        return
    check_metadata(path)
    _try(path, n_ctx if n_ctx is not None and n_ctx < DEFAULT_CONTEXT else 0, on_wait)
    with suppress(OSError):  # then it is tried again the next time
        _remember(record, path)


def release_key(path: Path) -> str:
    """A key for facts about a model file, as it was last written, under this release of llama.cpp."""
    key = hashlib.sha256(version("llama-cpp-python").encode())
    for part in file_parts(path):
        key.update(f"{part.stat().st_mtime_ns} {file_identity(part)}\n".encode())
    return key.hexdigest()[:32]


def _remember(record: Path, path: Path) -> None:
    record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_file(record, json.dumps(str(path)) + "\n")
    oldest = sorted(record.parent.iterdir(), key=lambda found: found.stat().st_mtime)
    for forgotten in oldest[:-_N_REMEMBERED]:
        forgotten.unlink(missing_ok=True)


def _try(path: Path, n_ctx: int, on_wait: OnWait | None) -> None:
    n_bytes = sum(part.stat().st_size for part in file_parts(path))
    reads_weights = n_bytes <= min(LARGE_BYTES, available_bytes())
    if not reads_weights:
        n_bytes = 0
    limits = (CPU_SECONDS + n_bytes // BYTES_PER_CPU_SECOND, SPARE_BYTES + n_bytes)
    settings = [*limits, n_ctx, int(reads_weights), path.absolute()]
    environment = {
        TRUST: "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # GPU buffers would count as memory, and one token needs no GPU.
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }
    wait = (lambda: None) if on_wait is None else partial(on_wait, 0.0)
    seconds = WALL_SECONDS + n_bytes / BYTES_PER_SECOND
    try:
        outcome = run_child(_CHILD, [*map(str, settings)], wait, seconds, environment)
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"cannot try {path} in a child process: {error}; set {TRUST}=1 if you are sure of it"
        ) from error
    _judge(path, outcome)


def _judge(path: Path, outcome: Outcome | None) -> None:
    """Raise the error that the child reported, or one for its crash."""
    if outcome is None or outcome.code == -getattr(signal, "SIGXCPU", 0):
        raise ModelFileError(f"{path} keeps llama.cpp busy without end; {_REMEDY}")
    code = outcome.code
    if code == -signal.SIGINT:
        raise KeyboardInterrupt
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        raise ModelFileError(f"{path} ends llama.cpp ({name}): it is damaged or hostile; {_REMEDY}")
    kind, message = _parsed(outcome.answer)
    if code != 0 or kind is None:
        raise ModelFileError(f"the trial of {path} failed (exit code {code}); {_REMEDY}")
    if kind == "memory":
        raise ModelFileError(f"{path} needs more memory than a file of its size should; {_REMEDY}")
    if kind:
        raise MemoryFullError(message) if kind == "MemoryFullError" else ModelFileError(message)


def _parsed(answer: bytes) -> tuple[str | None, str]:
    try:
        kind, message = json.loads(answer)
    except (ValueError, TypeError, RecursionError):
        return None, ""
    return str(kind), str(message)
