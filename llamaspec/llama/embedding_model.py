"""A GGUF model that turns texts into vectors, or pairs of texts into scores, computed by llama.cpp.

Several texts share an evaluation. Nothing is cached between two of them, so a vector depends on nothing but
its text. How the rows of a text become one (its pooling) is in the file. Only the compute thread evaluates.
tests/test_embedder.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.errors import (
    EvaluationAbortedError,
    EvaluationError,
    MemoryFullError,
    ModelFileError,
    ScoresError,
)
from llamaspec.kernels import library
from llamaspec.llama import resources, runtime
from llamaspec.llama.batch import Batch, Segment
from llamaspec.llama.context import default_context_size
from llamaspec.llama.file_facts import EMBEDDERS, NO_POOLING, file_facts
from llamaspec.llama.gguf_file import GgufFile, check_gguf, file_parts, kv_row_sizes, read_gguf
from llamaspec.llama.options import FLASH_ATTENTION, ModelOptions, cache_bytes
from llamaspec.llama.resources import ThreadGovernor, governors
from llamaspec.llama.runtime import AbortFlag, Handle
from llamaspec.llama.weights import LoadProgress, ModelFacts, Weights
from llamaspec.values import Rows, TokenArray

N_TEXTS = 64  # maximum number of texts in one evaluation
WIDTH = 256  # positions of an evaluation of several texts: each attends to those of all, so more cost more
LARGE_VOCABULARY = 1 << 16  # with more tokens, no matrix but the output matrix has so many rows
_NO_SCORES = np.zeros(1, dtype=np.int32)  # the one panel of the output matrix that is computed
_POOLINGS = {
    lib.LLAMA_POOLING_TYPE_MEAN: "mean",
    lib.LLAMA_POOLING_TYPE_CLS: "cls",
    lib.LLAMA_POOLING_TYPE_LAST: "last",
    lib.LLAMA_POOLING_TYPE_RANK: "rank",
}


class EmbeddingModel:
    """A loaded model. Close it after use.

    Raises
    ------
    ModelFileError
        The file is missing, damaged, or names no pooling.
    MemoryFullError
        The machine has no room for the weights or the context.
    """

    def __init__(
        self, path: Path, options: ModelOptions | None = None, on_load: LoadProgress | None = None
    ) -> None:
        self.path, self.options = path, options or ModelOptions()
        _check(path)
        self.weights = Weights(path, self.options, on_load)
        self.vocabulary = self.weights.vocabulary
        self.vocabulary_size = self.vocabulary.size
        self._abort = AbortFlag()
        self._handle: Handle | None = None
        try:
            self.context_size = _context_size(read_gguf(path), self.options, self.weights.facts.weights_bytes)
            self._governors: Sequence[ThreadGovernor] = governors() if self.options.threads is None else ()
            self._n_threads = self.options.threads or resources.default_threads()
            pointer = self._open(WIDTH)
            self.pooling = _POOLINGS.get(lib.llama_pooling_type(pointer), "")
            # Only then can a long text be evaluated in parts: its last row has seen all others.
            self._splits = lib.llama_get_causal_attn(pointer) and self.pooling in ("last", "rank")
            if not self._splits and self.context_size > WIDTH:
                pointer = self._open(self.context_size)
            if not self.pooling:
                raise ModelFileError(f"{path} {NO_POOLING}")
        except BaseException:
            self.close()
            raise
        self._memory = lib.llama_get_memory(pointer)
        self._batch = Batch(WIDTH if self._splits else max(WIDTH, self.context_size))
        # Numbers in a vector. Of a reranker's, the first is the score.
        n_out = lib.llama_model_n_cls_out if self.ranks else lib.llama_model_n_embd_out
        self.size: int = n_out(self.weights.pointer)
        self.weights.huge_pages.start()

    @property
    def ranks(self) -> bool:
        """Whether it scores pairs of texts, a query and a document."""
        return self.pooling == "rank"

    @property
    def trained_context_size(self) -> int:
        """The longest text that the model was trained on, in tokens."""
        return self.weights.trained_context_size

    @property
    def description(self) -> str:
        """Architecture, number of parameters and quantization."""
        return self.weights.description

    def facts(self) -> ModelFacts:
        """Return facts about the weights."""
        return self.weights.facts

    def evaluate(self, texts: Sequence[TokenArray]) -> Rows:
        """Evaluate texts that fit together, see `n_fitting`; return their vectors: [n, size].

        Raises EvaluationAbortedError if `abort` was called, and EvaluationError, MemoryFullError or
        ScoresError if llama.cpp failed or the numbers are not finite.
        """
        try:
            for start in range(0, max(map(len, texts)), self._batch.size):
                end = start + self._batch.size
                self._decode([Segment(i, start, each[start:end], len(each[start:end]))
                              for i, each in enumerate(texts)])  # fmt: skip
            rows = np.stack([self._vector(i) for i in range(len(texts))])
        finally:
            if self._memory:
                lib.llama_memory_clear(self._memory, False)
        if not np.isfinite(rows).all():
            raise ScoresError(f"{self.path} gives vectors that are not numbers; download or convert it again")
        return rows

    def abort(self) -> None:
        """Abort the running evaluation, or otherwise the next one; may be called from any thread."""
        self._abort.set()

    def close(self) -> None:
        """Free everything. Later calls do nothing."""
        self._handle = None
        self.weights.close()

    @property
    def _pointer(self) -> Any:
        """The llama_context."""
        return runtime.opened(self._handle).pointer

    def _open(self, width: int) -> Any:
        """Make a llama_context that evaluates up to `width` positions at once; return it."""
        self._handle = None  # frees the one before
        options, parameters = self.options, lib.llama_context_default_params()
        parameters.n_ctx = max(self.context_size, width)
        parameters.n_batch = parameters.n_ubatch = width
        parameters.n_seq_max = N_TEXTS
        parameters.embeddings = parameters.kv_unified = parameters.swa_full = True
        parameters.n_threads = parameters.n_threads_batch = self._n_threads
        parameters.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
        with runtime.raising_callbacks(), runtime.log.of_call() as said:
            pointer = lib.llama_init_from_model(self.weights.pointer, parameters)
        if not pointer:
            raise MemoryFullError(
                f"llama.cpp cannot make a context of {self.context_size} tokens for {self.path}: "
                f"{said.reason}; use a smaller context"
            )
        self._handle = Handle(pointer, lib.llama_free, self.weights.handle, self._abort)
        lib.llama_set_abort_callback(pointer, AbortFlag.ASK, self._abort.address)
        return pointer

    def _decode(self, segments: Sequence[Segment]) -> None:
        pointer, filled = self._pointer, self._batch.fill(segments)
        if self._governors and self._n_threads != self._governors[0].n_threads:
            self._n_threads = self._governors[0].n_threads
            lib.llama_set_n_threads(pointer, self._n_threads, self._n_threads)
        for each in self._governors:
            each.begin()
        try:
            with self._without_scores(), runtime.log.of_call() as said:
                status = lib.llama_decode(pointer, filled)
        finally:
            self._abort.clear()
            for each in self._governors:
                each.finish(self._n_threads)
        if status == 2:
            raise EvaluationAbortedError("the evaluation was aborted")
        if status:
            raise EvaluationError(f"llama.cpp could not evaluate (code {status}): {said.reason}")

    def _without_scores(self) -> AbstractContextManager[None]:
        """Leave out the scores of next tokens, which llama.cpp computes for every position."""
        if self.vocabulary_size <= LARGE_VOCABULARY:
            return nullcontext()
        return library.only_panels(_NO_SCORES, self.vocabulary_size)

    def _vector(self, seq_id: int) -> Rows:
        """Return a view of a text's vector, valid until the next evaluation."""
        found = lib.llama_get_embeddings_seq(self._pointer, seq_id)
        memory = (ctypes.c_float * self.size).from_address(ctypes.addressof(found.contents))
        return np.ctypeslib.as_array(memory)

    def n_fitting(self, lengths: Sequence[int]) -> int:
        """Return how many of the first texts one evaluation takes, by their lengths in tokens; at least 1."""
        n, n_positions = 0, 0
        for length in lengths[:N_TEXTS]:
            n_positions += length
            if n and n_positions > WIDTH:
                break
            n += 1
        return n


def _check(path: Path) -> None:
    """Raise ModelFileError if a file makes neither vectors nor scores."""
    check_gguf(path)
    kind = file_facts(path).kind
    if kind not in EMBEDDERS:
        raise ModelFileError(f"{path} is {kind.value}; name an embedding model or a reranker")


def embedder_bytes(path: Path, options: ModelOptions) -> int:
    """Return the bytes that a model needs once it is loaded and evaluates a text of its longest length.

    May raise OSError.
    """
    found = read_gguf(path)
    n_weights = sum(part.stat().st_size for part in file_parts(path))
    n_ctx = _context_size(found, options, n_weights)
    return n_weights + round(_bytes_per_token(found) * max(n_ctx, WIDTH))


def _context_size(found: GgufFile, options: ModelOptions, n_weights: int) -> int:
    """Return the longest text in tokens: never more than the model was trained on.

    llama.cpp would read beyond the end of a table of positions.
    """
    trained = found.number("context_length", WIDTH)
    if options.n_ctx is not None:
        return min(options.n_ctx, trained)
    return default_context_size(trained, _bytes_per_token(found), n_weights, resources.available_bytes())


def _bytes_per_token(found: GgufFile) -> float:
    """Return the memory of a context for each of its tokens, roughly.

    Attention that is not causal keeps no keys and values, but llama.cpp then makes room for the scores of
    next tokens at all positions.
    """
    is_causal = found.metadata.get(f"{found.architecture}.attention.causal", True)
    if is_causal and found.architecture != "gemma-embedding":
        return cache_bytes("f16") * sum(n_key + n_value for n_key, n_value in kv_row_sizes(found))
    embedding = found.tensors.get("token_embd.weight")
    return 4.0 * (0 if embedding is None else embedding.sizes[-1])
