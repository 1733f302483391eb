"""A trial of a model file in a child process, the first time that llamaspec opens it.

Some damaged files make llama.cpp abort, hang or take all memory, and checks of the metadata cannot find them
all. So a child process with limited memory and time uses the file first; if that fails, an error says why.
The child evaluates some tokens. Of a large file it reads only metadata and vocabulary, so that the weights
are read only once. Files that passed are recorded by size, time and beginning, and not tried again. This
module contains both sides: `ensure_tried` starts the child, which runs `main`. tests/llama/test_trial.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np

from llamaspec.errors import LlamaspecError, MemoryFullError, ModelFileError, PromptError, ScoresError
from llamaspec.files import cache_folder, file_identity, write_file
from llamaspec.kernels import AUTO, OFF, VARIABLE, library
from llamaspec.llama.child import (
    Outcome,
    end_with_answer,
    end_with_parent,
    limit_cpu,
    limit_memory,
    run_child,
)
from llamaspec.llama.gguf_file import check_metadata, file_parts, read_gguf
from llamaspec.llama.nextn import PARTS, heads_in_file
from llamaspec.llama.options import DEFAULT_CONTEXT, ModelOptions
from llamaspec.llama.resources import available_bytes
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.values import MTP, TARGET, ForwardRequest, HiddenInput, TokenArray

TRUST = "LLAMASPEC_TRUST_FILES"  # environment variable: open every file without a trial

LARGE_BYTES = 2 << 30  # larger files are tried without their weights: a SATA SSD reads this in four seconds
SMALL_BYTES = 1 << 30  # with fewer bytes of weights, more than one token is evaluated
CPU_SECONDS = 15  # limit for a small file
BYTES_PER_CPU_SECOND = 100_000_000  # one thread evaluates a token faster than this
WALL_SECONDS = 120.0  # limit for a small file on a busy machine
BYTES_PER_SECOND = 10e6  # of a slow disk
SPARE_BYTES = 2 << 30  # limit of memory for contexts and buffers, besides the size of the file
_LONGEST_MESSAGE = 4000  # characters, so that the JSON is not cut off
_REMEDY = f"download or convert it again, or set {TRUST}=1 if you trust it"
_SUPPLIED = Path(__file__).resolve().parent.parent / "demo"  # models that come with llamaspec
_CODES = (*range(0x800), *range(0x800, 0xD800, 0x400), 0xE000, 0xF000, *range(0x10000, 0x110000, 0x30000))
_SAMPLE = "The 1st line " + "".join(map(chr, _CODES))  # contains every byte of UTF-8

OnWait = Callable[[float], None]  # called with 0.0 repeatedly


def ensure_tried(path: Path, n_ctx: int | None = None, on_wait: OnWait | None = None) -> None:
    """Try a file whose header has been checked, unless it is trusted or has passed before.

    The trial's context is not larger than `n_ctx`. `on_wait` is called while the trial runs; an exception
    there ends it.

    Raises
    ------
    ModelFileError
        The metadata is impossible; or llama.cpp crashes, hangs, needs too much memory or refuses the file.
    MemoryFullError
        The machine has no room for the model.
    """
    if os.environ.get(TRUST, "0") not in ("", "0") or path.resolve().parent == _SUPPLIED:
        return
    try:
        record = cache_folder() / "tried" / release_key(path)
    except OSError as error:  # from another part of the model
        raise ModelFileError(f"cannot read {path}: {error.strerror}; name a readable file") from error
    with suppress(OSError):  # the folder may not be searched
        if record.is_file():
            return
    check_metadata(path)
    _try(path, n_ctx if n_ctx is not None and n_ctx < DEFAULT_CONTEXT else 0, on_wait)
    with suppress(OSError):  # then the file is tried again next time
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(record, json.dumps(str(path)) + "\n")


def release_key(path: Path) -> str:
    """Return a cache key for a model file: it depends on its latest change and the release of llama.cpp."""
    key = hashlib.sha256(version("llama-cpp-python").encode())
    for part in file_parts(path):
        key.update(f"{part.stat().st_mtime_ns} {file_identity(part)}\n".encode())
    return key.hexdigest()[:32]


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
        VARIABLE: OFF if library.facts.level is None else AUTO,  # an option may have switched them off
        # The limit of memory would include GPU buffers, and the trial needs no GPU.
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }
    wait = None if on_wait is None else partial(on_wait, 0.0)
    seconds = WALL_SECONDS + n_bytes / BYTES_PER_SECOND
    try:
        outcome = run_child(__name__, [*map(str, settings)], wait, seconds, environment)
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"cannot try {path} in a child process: {error}; set {TRUST}=1 if you trust it"
        ) from error
    check_outcome(path, outcome)


def check_outcome(path: Path, outcome: Outcome | None) -> None:
    """Raise the error that the child reported, or one for its crash; None = the child took too long."""
    if outcome is None or outcome.code == -signal.SIGXCPU:
        raise ModelFileError(f"{path} keeps llama.cpp busy without end; {_REMEDY}")
    code = outcome.code
    if code == -signal.SIGINT:
        raise KeyboardInterrupt
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        raise ModelFileError(f"{path} crashes llama.cpp ({name}): it is damaged or hostile; {_REMEDY}")
    kind, message = "no answer", f"the trial of {path} failed (exit code {code}); {_REMEDY}"
    if code == 0:
        with suppress(ValueError, TypeError, RecursionError):
            kind, message = map(str, json.loads(outcome.answer))
    if kind == "memory":
        raise ModelFileError(f"{path} needs more memory than a file of its size should; {_REMEDY}")
    if kind:
        raise MemoryFullError(message) if kind == "MemoryFullError" else ModelFileError(message)


# In the child


def main() -> None:
    """Set limits and use the file; answer with the name and message of an error, or two empty strings.

    Arguments: seconds, bytes of memory, context size (0 = default), whether to read the weights, path.
    """
    seconds, n_bytes, n_ctx, reads_weights = map(int, sys.argv[1:5])
    end_with_parent()
    limit_memory(n_bytes)
    limit_cpu(seconds)
    kind, message = "", ""
    try:
        use_file(Path(sys.argv[5]), n_ctx, reads_weights=bool(reads_weights))
    except MemoryError:
        kind = "memory"
    except LlamaspecError as error:
        kind, message = type(error).__name__, str(error)
        if isinstance(error, MemoryFullError) and available_bytes() > n_bytes:
            kind = "memory"  # the limit was reached, not the end of the machine's memory
    end_with_answer(json.dumps([kind, message[:_LONGEST_MESSAGE]]))


def use_file(path: Path, n_ctx: int, *, reads_weights: bool) -> None:
    """Open the file and use its whole vocabulary; if `reads_weights`, evaluate some tokens."""
    from llamaspec.llama.heads import PredictionHeads  # these modules import this one
    from llamaspec.llama.model import LlamaModel
    from llamaspec.llama.weights import Weights

    found = read_gguf(path)
    n_ctx = max(2, n_ctx or min(DEFAULT_CONTEXT, found.number("context_length", DEFAULT_CONTEXT)))
    options = ModelOptions(n_ctx=n_ctx, gpu_layers=0, threads=1, repack=False)  # repacking would copy weights
    if found.architecture in PARTS or not reads_weights:  # parts cannot be evaluated without their target
        _use_vocabulary(Weights(path, options, vocabulary_only=not reads_weights).vocabulary)
        return
    has_heads = heads_in_file(path).fault is None
    with LlamaModel(path, replace(options, heads=has_heads)) as model:
        tokens = _use_vocabulary(model.vocabulary)
        n_bytes = model.facts().weights_bytes
        # Evaluations of some damaged files never end: allow a few times the time of opening the file.
        limit_cpu(math.ceil(2 + 5 * time.process_time() + n_bytes / BYTES_PER_CPU_SECOND))
        _ = model.description, model.metadata("tokenizer.chat_template")
        is_small = n_bytes < SMALL_BYTES
        tokens = tokens[: min(model.context_size, 64 if is_small else 1)]
        with suppress(ScoresError):  # harmless: it is raised again when the model is used
            model.forward(ForwardRequest(TARGET, tokens))
            if is_small and model.context_size > 32:
                model.try_memory()
            if has_heads and len(tokens) > 1:
                model.forward(ForwardRequest(TARGET, tokens, rows_from=0))
                with closing(PredictionHeads(model)) as heads:
                    hidden = model.hidden(-1)
                    assert hidden is not None
                    own = np.empty((0, 0), dtype=np.float32)
                    request = ForwardRequest(MTP, tokens, hidden=HiddenInput(1, hidden, own))
                    if isinstance(heads.prepare([(-1, request, 0)])[0], int):
                        heads.evaluate([(-1, request)])


def _use_vocabulary(vocabulary: LlamaVocabulary) -> TokenArray:
    """Read every token and tokenize a sample; return at least one token."""
    for token in range(vocabulary.size):
        vocabulary.piece(token)
        vocabulary.is_end(token)
    _ = vocabulary.controls
    tokens = np.zeros(1, dtype=np.int32)
    with suppress(PromptError):  # the sample's fault, not the file's
        vocabulary.tokenize(_SAMPLE.encode(), parse_special=True)
        tokens = np.concatenate([vocabulary.tokenize(_SAMPLE.encode()), tokens])
    return tokens
