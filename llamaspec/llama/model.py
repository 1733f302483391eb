"""A GGUF model that evaluates rows of tokens, computed by llama.cpp: the engine's `Model`.

If the KV cache is made of keys and values, all rows share one context; long prompts may be processed in
another one. If layers keep recurrent states, every row has a context of its own, because such memories cannot
be rolled back side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.errors import ContextFullError, ModelFileError
from llamaspec.llama import resources
from llamaspec.llama.cells import CachedSequence
from llamaspec.llama.context import Context, leaves_main_memory
from llamaspec.llama.kv_cache import Prepared
from llamaspec.llama.nextn import PARTS
from llamaspec.llama.options import N_BRANCHES, N_SEQUENCES, ModelOptions
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.prompt_reader import make_reader
from llamaspec.llama.runtime import AbortFlag
from llamaspec.llama.tree_cells import n_leaves
from llamaspec.llama.weights import LoadProgress, ModelFacts, Weights
from llamaspec.values import CHUNK, TARGET, ForwardRequest, Logits, TokenArray

TILE = 64  # positions
STORE_SHARE, MOST_STORED = 4, 8 << 30  # of the free memory, and bytes
N_READ, N_DRAFTED, N_REJECTED = 16, 4, 2  # tokens of a trial of the memory


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """The size of the KV cache, and what is left of it after the last draft tokens were rejected."""

    bytes_per_token: float
    fixed_bytes: int  # of states, whatever the length of the text
    n_right: int  # tokens of the trial that stayed right
    n_kept: int  # of them, those that the memory still held

    @property
    def n_reread(self) -> int:
        """Tokens that had to be read again."""
        return self.n_right - self.n_kept

    def size(self, n_ctx: int) -> int:
        """Bytes for a whole context."""
        return self.fixed_bytes + round(self.bytes_per_token * n_ctx)


class LlamaModel:
    """A loaded model. Close it, or use it as a context manager.

    Parameters
    ----------
    path : Path
        A GGUF file.
    options : ModelOptions
    on_load : callable, optional
        Called with the fraction that is loaded.
    weights : Weights, optional
        Of the same file, if they are loaded already; the caller closes them.
    store : PrefixStore, optional
        Of another model, whose memory for finished sequences this model shares; default: memory of its own.

    Raises
    ------
    ModelFileError
        The file is missing, damaged, or cannot generate text.
    MemoryFullError
        The machine has no room for the weights or the KV cache.
    """

    def __init__(
        self,
        path: Path,
        options: ModelOptions | None = None,
        on_load: LoadProgress | None = None,
        weights: Weights | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        self.path = path
        self.options = options or ModelOptions()
        self.weights = weights or Weights(path, self.options, on_load)
        self._owns_weights = weights is None
        self.vocabulary = self.weights.vocabulary
        self.vocabulary_size = self.vocabulary.size  # V, the number of logits for each position
        self.trained_context_size = self.weights.trained_context_size
        # Some layers keep states: no padding, no trees of draft tokens, a context for each row.
        self.keeps_states = self.weights.facts.keeps_states
        self._abort = AbortFlag()
        own_bytes = default_store_bytes(self.weights.facts.weights_bytes) if store is None else 0
        self.store = PrefixStore(own_bytes, beside=store)
        self._open = partial(Context, abort=self._abort, store=self.store)
        try:
            if self.weights.facts.architecture in PARTS:  # llama.cpp cannot evaluate it alone
                raise ModelFileError(
                    f"{path} is no whole model but a part of one ({self.weights.facts.architecture}); "
                    "give a whole one"
                )
            context = self._open(self.weights, self.options)
        except BaseException:
            if self._owns_weights:
                self.weights.close()
            raise
        self._contexts = [context]  # more only if every row has its own
        self.context_size = context.context_size
        self.batch_size = context.batch_size
        self._chunk = self.batch_size
        self._shares = True  # rows take over what others have computed
        self.reader = make_reader(self.weights, self.options, context, self._open)
        self.max_scored = context.max_scored
        self.max_chunked_prefill = (
            0 if self.keeps_states else _max_chunked_prefill(self.weights, self.options, context)
        )

    @property
    def n_cells(self) -> int | None:
        """Tokens that all rows together can cache; None if each has a context of its own."""
        return None if self.keeps_states else self._contexts[0].cache.size

    def n_cached(self, tokens: TokenArray) -> int:
        """How many of the first of some tokens need not be evaluated again."""
        return max(context.cache.n_known(tokens) for context in self._contexts)

    @property
    def prompt_chunk(self) -> int:
        """Positions of a prompt to evaluate at once while no other row waits."""
        return (self.reader and self.reader.chunk) or self._chunk

    def isolate_texts(self) -> None:
        """Compute every row as if it were alone, for models that round differently at other widths.

        Rows take over nothing from each other, and prompts are processed in equal parts, beside no other row.
        """
        self._shares, self.max_chunked_prefill = False, 0
        self._chunk = min(CHUNK, self.batch_size)
        for context in self._contexts:
            context.cache.shares = False

    def can_share(self, row: int) -> bool:
        """Whether other rows may take part in the next evaluation of a row, and padding."""
        is_apart = self.reader is not None and self.reader.is_reading(row)
        return not (self.keeps_states or is_apart)

    @property
    def description(self) -> str:
        """Architecture, number of parameters and quantization."""
        return self.weights.description

    def metadata(self, key: str) -> str | None:
        """One metadata entry of the file as text; None if there is none."""
        return self.weights.metadata(key)

    def facts(self) -> ModelFacts:
        """What the weights are."""
        return self.weights.facts

    def prepare(self, batch: Sequence[Prepared]) -> Sequence[int | ContextFullError]:
        """Make room for requests: how many tokens of each are cached, or why there is no room.

        ValueError if a request is not possible: llama.cpp would abort the process.
        """
        for _, request, _ in batch:
            self.check(request)
        if self.keeps_states:
            return [self._prepare_alone(entry) for entry in batch]
        answers = self._contexts[0].cache.prepare_all(batch)
        if self.reader is None:
            return answers
        return [self.reader.prepare(entry, each) for entry, each in zip(batch, answers, strict=True)]

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests: views [n_logits + K, V] float32, valid until the next call.

        EvaluationAbortedError if `abort` was called. EvaluationError, MemoryFullError or ScoresError if
        llama.cpp failed, or the logits are not numbers; then the KV cache is empty.
        """
        if self.reader is not None and len(batch) == 1 and not batch[0][1].n_scored:
            return self.reader.evaluate(*batch[0])
        context = self._context(batch[0][0])
        assert context is not None  # prepared
        return context.evaluate(batch, n_padding)

    def forward(self, request: ForwardRequest, row: int = -1) -> Logits:
        """Prepare and evaluate one request, beside no other row; raises ContextFullError, too."""
        (n_cached,) = self.prepare([(row, request, 0)])
        if isinstance(n_cached, ContextFullError):
            raise n_cached
        while request.n_tokens - n_cached > self.batch_size:
            n_cached = min(n_cached + self.batch_size, request.n_before)
            self.evaluate([(row, request.prefill(n_cached))])
        return self.evaluate([(row, request)])[0]

    def release(self, row: int) -> None:
        """End a row. What is cached of it may serve others, until its room is needed."""
        context = self._context(row)
        if self.reader is not None:
            self.reader.release(row)
        if context is not None:
            context.cache.release(row)

    def forget(self) -> None:
        """Empty the KV cache and the store, as if nothing had been evaluated."""
        for context in self._contexts:
            context.clear()
        if self.reader is not None:
            self.reader.forget()

    def store_finished(self) -> None:
        """Have the sequences that have ended in the store."""
        for context in self._contexts:
            context.cache.store_finished()

    def abort(self) -> None:
        """End a running evaluation, or else the next one, soon; from any thread."""
        self._abort.set()

    def cached(self, row: int) -> CachedSequence | None:
        """What the KV cache holds of a row, with its last hidden rows; None before its first request."""
        context = self._context(row)
        return None if context is None else context.cache.of_row[row]

    def cache_use(self) -> tuple[int, int]:
        """Tokens that the KV cache holds, and how many it could: of all contexts, from any thread."""
        caches = [context.cache for context in list(self._contexts)]
        return sum(cache.n_used for cache in caches), sum(cache.size for cache in caches)

    def context_beside(self, weights: Weights, abort: AbortFlag) -> Context:
        """A context for a prediction head with weights of its own, which reads this model's KV cache."""
        options = replace(self.options, n_ctx=self.context_size)
        return Context(weights, options, head=0, other=self._contexts[0], abort=abort)

    def try_memory(self) -> MemoryFacts:
        """Find out by trying how much the KV cache needs and how it goes back; it is emptied."""
        tokens, context, sizes = np.ones(N_READ + N_DRAFTED, dtype=np.int32), self._contexts[0], []
        try:
            for n in (1, N_READ):
                self.forget()
                self.forward(ForwardRequest(TARGET, tokens[:n]))
                number = context.cache.of_row[-1].number
                sizes.append(int(lib.llama_state_seq_get_size(context.pointer, number)))
            per_token = (sizes[1] - sizes[0]) / (N_READ - 1)
            self.forward(ForwardRequest(TARGET, tokens, min(N_DRAFTED + 1, self.max_scored)))
            tokens[-N_REJECTED:] = 0
            (n_kept,) = self.prepare([(-1, ForwardRequest(TARGET, tokens), 0)])
            n_kept = n_kept if isinstance(n_kept, int) else 0
            fixed_bytes = max(0, round(sizes[0] - per_token))
            return MemoryFacts(per_token, fixed_bytes, len(tokens) - N_REJECTED, n_kept)
        finally:
            self.forget()
            self.release(-1)

    def check(self, request: ForwardRequest) -> None:
        """Raise ValueError if llama.cpp would abort the process."""
        if not 0 < request.n_tokens <= self.context_size:
            raise ValueError(f"{request.n_tokens} tokens do not fit a context of {self.context_size}")
        if request.is_tree and self.keeps_states:
            raise ValueError("this model evaluates chains of draft tokens, not trees")
        if request.parents is not None and n_leaves(request.parents) > N_BRANCHES:
            raise ValueError(f"a tree of draft tokens has at most {N_BRANCHES} branches")
        for tokens in (request.tokens, request.draft):
            # As unsigned numbers negative ones are large: one pass over the array instead of two.
            if len(tokens) and int(np.maximum.reduce(tokens.view(np.uint32))) >= self.vocabulary.size:
                raise ValueError(f"token ids must be from 0 to {self.vocabulary.size - 1}")

    def close(self) -> None:
        """Free everything; more than once is allowed."""
        for context in self._contexts:
            context.close()
        if self.reader is not None:
            self.reader.close()
        if self._owns_weights:
            self.weights.close()

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _context(self, row: int) -> Context | None:
        """The context that holds a row's sequence; None before its first request."""
        for context in self._contexts:
            if row in context.cache.of_row:
                return context
        return None

    def _prepare_alone(self, entry: Prepared) -> int | ContextFullError:
        """Prepare in the row's own context: the free one that knows most of the sequence, or a new one."""
        row, request, _ = entry
        context = self._context(row)
        if context is None:
            free = [context for context in self._contexts if not context.cache.of_row]
            if not free and len(self._contexts) >= N_SEQUENCES:
                return ContextFullError(f"{N_SEQUENCES} texts are running already; wait for one to end")
            if not free:
                # Of the same size, though the memory that is free may have changed.
                free = [self._open(self.weights, replace(self.options, n_ctx=self.context_size))]
                free[0].cache.shares = self._shares
                self._contexts += free
            context = max(free, key=lambda each: each.cache.n_known(request.tokens))
        return context.cache.prepare_all([entry])[0]


def default_store_bytes(weights_bytes: int) -> int:
    """Default size of the store: a quarter of the memory that the weights leave, at most 8 GiB."""
    return min(max(0, resources.available_bytes() - weights_bytes) // STORE_SHARE, MOST_STORED)


def _max_chunked_prefill(weights: Weights, options: ModelOptions, context: Context) -> int:
    """On CPUs flash attention over f16 adds in another order if 64 positions are evaluated at once."""
    types = options.cache_type_k, options.cache_type_v
    is_tiled = options.flash_attention != "off" and types == ("f16", "f16")
    if not is_tiled or leaves_main_memory(weights, options):
        return context.batch_size
    return min(context.batch_size, TILE - 1)
