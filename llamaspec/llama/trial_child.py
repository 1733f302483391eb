"""The child process of a trial: uses files that may be damaged, within limits of memory and time.

`trial.py` starts it, and makes an error of its answer. tests/llama/test_trial.py.
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

from llamaspec.errors import (
    EvaluationError,
    LlamaspecError,
    MemoryFullError,
    PairError,
    PromptError,
    ScoresError,
)
from llamaspec.llama.block_draft import BlockDraft
from llamaspec.llama.child import end_with_answer, end_with_parent, limit_cpu, limit_memory
from llamaspec.llama.embedding_model import EmbeddingModel
from llamaspec.llama.file_facts import EMBEDDERS, file_facts
from llamaspec.llama.gguf_file import PARTS, read_gguf
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.hidden_draft_file import heads_in_file, hidden_draft
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import DEFAULT_CONTEXT, ModelOptions
from llamaspec.llama.resources import available_bytes
from llamaspec.llama.trial import BYTES_PER_CPU_SECOND
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.llama.weights import Weights
from llamaspec.values import MTP, TARGET, ForwardRequest, HiddenInput, TokenArray

N_PAIR = 16  # tokens that a target evaluates with its draft
SMALL_BYTES = 1 << 30  # with fewer bytes of weights, more than one token is evaluated
_LONGEST_MESSAGE = 4000  # characters, so that the JSON is not cut off
_CODES = (*range(0x800), *range(0x800, 0xD800, 0x400), 0xE000, 0xF000, *range(0x10000, 0x110000, 0x30000))
_SAMPLE = "The 1st line " + "".join(map(chr, _CODES))  # contains every byte of UTF-8


def main() -> None:
    """Set limits and use the file; answer with the name and message of an error, or two empty strings.

    Arguments: seconds, bytes of memory, context size (0 = default), whether to read the weights, path; and
    the path of a draft that reads hidden rows of this model.
    """
    seconds, n_bytes, n_ctx, reads_weights = map(int, sys.argv[1:5])
    end_with_parent()
    limit_memory(n_bytes)
    limit_cpu(seconds)
    kind, message = "", ""
    try:
        path, *drafts = map(Path, sys.argv[5:])
        if drafts:
            use_pair(path, drafts[0], n_ctx)
        else:
            use_file(path, n_ctx, reads_weights=bool(reads_weights))
    except MemoryError:
        kind = "memory"
    except LlamaspecError as error:
        kind, message = type(error).__name__, str(error)
        if isinstance(error, MemoryFullError) and available_bytes() > n_bytes:
            kind = "memory"  # the limit was reached, not the end of the machine's memory
    end_with_answer(json.dumps([kind, message[:_LONGEST_MESSAGE]]))


def use_file(path: Path, n_ctx: int, *, reads_weights: bool) -> None:
    """Open the file and use its whole vocabulary; if `reads_weights`, evaluate some tokens."""
    found, options = read_gguf(path), _options(path, n_ctx)
    if found.architecture in PARTS or not reads_weights:  # parts cannot be evaluated without their target
        _use_vocabulary(Weights(path, options, vocabulary_only=not reads_weights).vocabulary)
        return
    if file_facts(path).kind in EMBEDDERS:
        _embed(path, options)
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
                with closing(PredictionHeads(model)) as heads:
                    _draft(heads, model, tokens)


def _embed(path: Path, options: ModelOptions) -> None:
    """Open a model that makes vectors, and let it evaluate two texts."""
    with closing(EmbeddingModel(path, options)) as model:
        tokens = _use_vocabulary(model.vocabulary)[: min(model.context_size, N_PAIR)]
        with suppress(ScoresError):  # as below
            model.evaluate([tokens, tokens])


def use_pair(target: Path, path: Path, n_ctx: int) -> None:
    """Open a target with a draft that reads its hidden rows, and draft."""
    file = hidden_draft(path)
    layers, options = () if file is None else file.layers, _options(target, n_ctx)
    with LlamaModel(target, replace(options, heads=file is None, hidden_layers=layers)) as model:
        draft: PredictionHeads | BlockDraft
        if file is not None and file.is_block:
            draft = BlockDraft(model, file)
        else:
            draft = PredictionHeads(model, path=path, draft=file)
        n = min(model.context_size, N_PAIR)
        tokens = np.linspace(0, model.vocabulary_size - 1, n).astype(np.int32)  # with the first and last one
        try:
            with closing(draft), suppress(ScoresError):  # as for a file
                _draft(draft, model, tokens)
        except EvaluationError as error:
            raise PairError(f"{path} cannot draft for {target}: {error}; name its own target") from error


def _draft(draft: PredictionHeads | BlockDraft, model: LlamaModel, tokens: TokenArray) -> None:
    """Evaluate tokens with the target, and draft what follows them."""
    model.forward(ForwardRequest(TARGET, tokens, rows_from=0))
    hidden, own = model.hidden(-1), np.empty((0, 0), dtype=np.float32)
    assert hidden is not None
    request = ForwardRequest(MTP, tokens, hidden=HiddenInput(1, hidden, own))
    if isinstance(draft, BlockDraft):
        open_ = np.full(draft.file.block - 1, draft.file.mask, dtype=np.int32)
        request = replace(request, draft=open_)
    if isinstance(draft.prepare([(-1, request, 0)])[0], int):
        draft.evaluate([(-1, request)])


def _options(path: Path, n_ctx: int) -> ModelOptions:
    n_ctx = max(2, n_ctx or min(DEFAULT_CONTEXT, read_gguf(path).number("context_length", DEFAULT_CONTEXT)))
    return ModelOptions(n_ctx=n_ctx, gpu_layers=0, threads=1, repack=False)  # repacking would copy weights


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
