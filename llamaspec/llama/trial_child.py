"""Runs in the process that tries a model file: sets its limits, then opens the file as llamaspec would.

It may crash, hang or be refused memory; its parent (`llama/trial.py`) reads the outcome. Its answer is a line
of JSON on stdout: the name of an error and its message, or two empty strings.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from llamaspec.errors import LlamaspecError, MemoryFullError, PromptError, ScoresError
from llamaspec.llama.gguf_file import read_gguf
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.model import PARTS, LlamaModel
from llamaspec.llama.nextn import heads_in_file
from llamaspec.llama.options import DEFAULT_CONTEXT, ModelOptions
from llamaspec.llama.runtime import available_bytes
from llamaspec.llama.trial import BYTES_PER_CPU_SECOND
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.llama.weights import Weights
from llamaspec.values import MTP, TARGET, ForwardRequest, TokenArray

_LONGEST_MESSAGE = 8000  # characters: what a pipe takes in one piece, whatever the path
SMALL_BYTES = 1 << 30  # of a file that is cheap enough for more than one token
_CODES = (*range(0x800), *range(0x800, 0xD800, 0x400), 0xE000, 0xF000, *range(0x10000, 0x110000, 0x30000))
SAMPLE = "The 1st line " + "".join(map(chr, _CODES))  # every byte that UTF-8 has


def main() -> None:
    """Try a file.

    Arguments: seconds, bytes of memory, tokens of the context (0 = as usual), 1 = read the weights, the file.
    """
    seconds, n_bytes, n_ctx, reads_weights = map(int, sys.argv[1:5])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    limit(seconds, n_bytes)
    kind, message = "", ""
    try:
        use(Path(sys.argv[5]), n_ctx, reads_weights=bool(reads_weights))
    except MemoryError:
        kind = "memory"
    except LlamaspecError as error:
        kind, message = type(error).__name__, str(error)
        if isinstance(error, MemoryFullError) and available_bytes() > n_bytes:
            kind = "memory"  # it was the limit
    print(json.dumps([kind, message[:_LONGEST_MESSAGE]]), flush=True)  # noqa: T201
    os._exit(0)  # without the risk of freeing what is damaged


def limit(seconds: int, n_bytes: int) -> None:
    """Bound memory and time where the system can; the parent watches the clock everywhere."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_DATA, _data_bytes() + n_bytes),  # weights that are mapped do not count
    ):
        hard = resource.getrlimit(what)[1]
        within = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(what, (within, hard))


def use(path: Path, n_ctx: int, *, reads_weights: bool) -> None:
    """Open the file and use all of its vocabulary; with its weights, evaluate some tokens."""
    found = read_gguf(path)
    architecture = found.architecture
    trained = found.numbers.get(f"{architecture}.context_length", DEFAULT_CONTEXT)
    n_ctx = max(2, n_ctx or min(DEFAULT_CONTEXT, trained))
    options = ModelOptions(n_ctx=n_ctx, gpu_layers=0, threads=1, repack=False)  # repacked is copied
    if architecture in PARTS or not reads_weights:  # of a part, all that can be done without the target
        weights = Weights(path, options, vocabulary_only=not reads_weights)
        _use_vocabulary(weights.vocabulary)
        return
    has_heads = heads_in_file(path).fault is None
    with LlamaModel(path, replace(options, heads=has_heads)) as model:
        tokens = _use_vocabulary(model.vocabulary)
        _limit_evaluation(model.facts().weights_bytes)
        _ = model.description, model.metadata("tokenizer.chat_template")
        small = model.facts().weights_bytes < SMALL_BYTES
        tokens = tokens[: min(model.context_size, 64 if small else 1)]
        with suppress(ScoresError):  # of a draft that is only useless; a target's are told when it is used
            model.forward(ForwardRequest(TARGET, tokens))
            if small and model.context_size > 32:
                model.try_memory()
            if has_heads and len(tokens) > 1:
                _try_heads(model, tokens)


def _limit_evaluation(n_bytes: int) -> None:
    """Leave it a few times what opening took on this machine: some damaged files keep it busy without end."""
    try:
        import resource
    except ImportError:
        return
    opening = time.process_time()
    seconds = math.ceil(opening + 2 + 4 * opening + n_bytes / BYTES_PER_CPU_SECOND)
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if seconds < soft or soft == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


def _use_vocabulary(vocabulary: LlamaVocabulary) -> TokenArray:
    """Read every token, and tokenize a text: at least one token."""
    for token in range(vocabulary.size):
        vocabulary.piece(token)
        vocabulary.is_end(token)
    _ = vocabulary.controls
    tokens = np.zeros(1, dtype=np.int32)
    with suppress(PromptError):  # it concerns this text, not the file
        vocabulary.tokenize(SAMPLE.encode(), parse_special=True)
        tokens = np.concatenate([vocabulary.tokenize(SAMPLE.encode()), tokens])
    return tokens


def _try_heads(model: LlamaModel, tokens: TokenArray) -> None:
    """Draft a token with the prediction heads."""
    model.forward(ForwardRequest(TARGET, tokens))
    with PredictionHeads(model) as heads:
        request = ForwardRequest(MTP, tokens)
        (n_cached,) = heads.prepare([(-1, request, 0)])
        if isinstance(n_cached, int):
            heads.evaluate([(-1, request)])


def _data_bytes() -> int:
    """What counts as data already: of Python and the libraries."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
