"""Runs in the child process that tries a model file: sets limits, then opens the file as llamaspec would.

It may crash, hang or run out of memory; its parent (`llama/trial.py`) handles that. Its answer is JSON: the
name of an error and its message, or two empty strings.
"""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from llamaspec.errors import LlamaspecError, MemoryFullError, PromptError, ScoresError
from llamaspec.llama.child import end_with_answer, end_with_parent, limit_cpu, limit_memory
from llamaspec.llama.gguf_file import read_gguf
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.nextn import PARTS, heads_in_file
from llamaspec.llama.options import DEFAULT_CONTEXT, ModelOptions
from llamaspec.llama.runtime import available_bytes
from llamaspec.llama.trial import BYTES_PER_CPU_SECOND
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.llama.weights import Weights
from llamaspec.values import MTP, TARGET, ForwardRequest, TokenArray

_LONGEST_MESSAGE = 4000  # characters, so that the JSON is not cut off
SMALL_BYTES = 1 << 30  # of a file small enough to evaluate more than one token
_CODES = (*range(0x800), *range(0x800, 0xD800, 0x400), 0xE000, 0xF000, *range(0x10000, 0x110000, 0x30000))
SAMPLE = "The 1st line " + "".join(map(chr, _CODES))  # every byte that UTF-8 has


def main() -> None:
    """Try a file.

    Arguments: seconds, bytes of memory, context size (0 = default), 1 = read the weights, path of the file.
    """
    seconds, n_bytes, n_ctx, reads_weights = map(int, sys.argv[1:5])
    end_with_parent()
    limit_memory(n_bytes)
    limit_cpu(seconds)
    kind, message = "", ""
    try:
        use(Path(sys.argv[5]), n_ctx, reads_weights=bool(reads_weights))
    except MemoryError:
        kind = "memory"
    except LlamaspecError as error:
        kind, message = type(error).__name__, str(error)
        if isinstance(error, MemoryFullError) and available_bytes() > n_bytes:
            kind = "memory"  # it was the limit
    end_with_answer(json.dumps([kind, message[:_LONGEST_MESSAGE]]))


def use(path: Path, n_ctx: int, *, reads_weights: bool) -> None:
    """Open the file and use all of its vocabulary; with its weights, evaluate some tokens."""
    found = read_gguf(path)
    trained = found.number("context_length", DEFAULT_CONTEXT)
    n_ctx = max(2, n_ctx or min(DEFAULT_CONTEXT, trained))
    options = ModelOptions(n_ctx=n_ctx, gpu_layers=0, threads=1, repack=False)  # repacked is copied
    if found.architecture in PARTS or not reads_weights:  # parts cannot be evaluated without their target
        weights = Weights(path, options, vocabulary_only=not reads_weights)
        _use_vocabulary(weights.vocabulary)
        return
    has_heads = heads_in_file(path).fault is None
    with LlamaModel(path, replace(options, heads=has_heads)) as model:
        tokens = _use_vocabulary(model.vocabulary)
        n_bytes = model.facts().weights_bytes
        # Some damaged files never finish an evaluation: allow it a few times the time of opening.
        opening = time.process_time()
        limit_cpu(math.ceil(2 + 5 * opening + n_bytes / BYTES_PER_CPU_SECOND))
        _ = model.description, model.metadata("tokenizer.chat_template")
        small = n_bytes < SMALL_BYTES
        tokens = tokens[: min(model.context_size, 64 if small else 1)]
        with suppress(ScoresError):  # useless as a draft, but harmless; a target reports them when it is used
            model.forward(ForwardRequest(TARGET, tokens))
            if small and model.context_size > 32:
                model.try_memory()
            if has_heads and len(tokens) > 1:
                _try_heads(model, tokens)


def _use_vocabulary(vocabulary: LlamaVocabulary) -> TokenArray:
    """Read every token and tokenize a sample; return at least one token."""
    for token in range(vocabulary.size):
        vocabulary.piece(token)
        vocabulary.is_end(token)
    _ = vocabulary.controls
    tokens = np.zeros(1, dtype=np.int32)
    with suppress(PromptError):  # the sample is at fault, not the file
        vocabulary.tokenize(SAMPLE.encode(), parse_special=True)
        tokens = np.concatenate([vocabulary.tokenize(SAMPLE.encode()), tokens])
    return tokens


def _try_heads(model: LlamaModel, tokens: TokenArray) -> None:
    """Draft a token with the prediction heads."""
    model.forward(ForwardRequest(TARGET, tokens))
    with closing(PredictionHeads(model)) as heads:
        request = ForwardRequest(MTP, tokens)
        (n_cached,) = heads.prepare([(-1, request, 0)])
        if isinstance(n_cached, int):
            heads.evaluate([(-1, request)])
