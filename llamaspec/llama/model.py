"""A GGUF model computed by llama.cpp: the engine's `Model`.

If the model caches keys and values, all sequences share one context. If layers keep recurrent states, each
sequence has its own context, because llama.cpp cannot roll them back independently in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.errors import ContextFullError, MemoryFullError, ModelFileError
from llamaspec.kernels import library
from llamaspec.llama import resources, runtime
from llamaspec.llama.cells import CachedSequence
from llamaspec.llama.context import (
    Context,
    attention_bytes_per_token,
    max_chunked_prefill,
    with_room,
)
from llamaspec.llama.devices import leaves_main_memory
from llamaspec.llama.gguf_file import PARTS
from llamaspec.llama.kv_cache import Prepared
from llamaspec.llama.memory_sizes import MemoryFacts
from llamaspec.llama.options import N_SEQUENCES, ModelOptions
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.runtime import AbortFlag
from llamaspec.llama.weights import LoadProgress, ModelFacts, Weights
from llamaspec.values import (
    NO_SCOPE,
    TARGET,
    ForwardRequest,
    HiddenRows,
    Logits,
    Scope,
    TokenArray,
    without_pictures,
)

if TYPE_CHECKING:
    from llamaspec.llama.pictures import Projector

N_TEXT, N_DRAFT, N_REJECTED = 16, 4, 2  # tokens of `try_memory`
NO_LIMIT = 1 << 31  # tokens
N_WIDE = 64  # positions of `why_inexact`: from 32 on, llama.cpp may give products to BLAS or a GPU

Longest: TypeAlias = Callable[[Weights], int | None]


class LlamaModel:
    """A loaded model. Close it, or use it as a context manager.

    Parameters
    ----------
    path : Path
        A GGUF file.
    options : ModelOptions
    on_load : callable, optional
        Called with the loaded fraction.
    store : PrefixStore, optional
        Another model's store, whose limit this model's store shares; default: a limit of its own.
    longest : callable, optional
        Returns the tokens of the longest sequence that will be evaluated, so that the default context is no
        larger than it needs to be; None = any number.

    Raises
    ------
    ModelFileError
        The file is missing, damaged, or cannot generate text.
    MemoryFullError
        The machine has no room for the weights or the KV cache.
    """

    part: tuple[object, ...] = ()  # what names its prefixes beside its file and options

    def __init__(
        self,
        path: Path,
        options: ModelOptions | None = None,
        on_load: LoadProgress | None = None,
        store: PrefixStore | None = None,
        longest: Longest | None = None,
    ) -> None:
        self.path = path
        self.options = options or ModelOptions()
        self.weights = Weights(path, self.options, on_load)
        self.vocabulary = self.weights.vocabulary
        self.vocabulary_size = self.vocabulary.size  # V, the number of logits for each position
        self._abort = AbortFlag()
        own_bytes = resources.default_store_bytes(self.weights.facts.weights_bytes) if store is None else 0
        self.store = PrefixStore(own_bytes, limit_of=store)
        self.projector: Projector | None = None
        try:
            if self.weights.facts.architecture in PARTS:  # llama.cpp cannot evaluate it alone
                raise ModelFileError(
                    f"{path} is only a part of a model ({self.weights.facts.architecture}); "
                    "give the whole model"
                )
            if self.options.projector is not None:
                from llamaspec.llama.picture_context import open_projector  # few models have one

                self.projector = open_projector(self.weights, self.options)
            options, n_tokens = self.options, None if longest is None else longest(self.weights)
            context = self._open(options if n_tokens is None else with_room(self.weights, options, n_tokens))
        except BaseException:
            self.weights.close()
            raise
        self._contexts = [context]  # one for each sequence if layers keep states, otherwise one
        self.max_chunked_prefill = (
            0 if self.keeps_states else max_chunked_prefill(self.weights, self.options, context)
        )
        self.weights.huge_pages.start()

    @property
    def context(self) -> Context:
        """The context of all sequences; if layers keep states, that of one of them."""
        return self._contexts[0]

    @property
    def context_size(self) -> int:
        """The longest sequence, in tokens."""
        return self._contexts[0].context_size

    @property
    def trained_context_size(self) -> int:
        """The longest sequence that the model was trained on, in tokens."""
        return self.weights.trained_context_size

    @property
    def batch_size(self) -> int:
        """Maximum number of positions in one evaluation."""
        return self._contexts[0].batch_size

    @property
    def max_scored(self) -> int:
        """Maximum number of positions in one evaluation that have logits."""
        return self._contexts[0].max_scored

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep states: then there is no padding, and a context per sequence."""
        return self.weights.facts.keeps_states

    @property
    def n_cells(self) -> int | None:
        """Number of tokens that all sequences together can cache; None if each has its own context."""
        return None if self.keeps_states else self._contexts[0].cache.size

    def n_cached(self, tokens: TokenArray, scope: Scope = NO_SCOPE) -> int:
        """Return how many of the first tokens need not be evaluated again for a sequence of some scope."""
        return max(context.cache.n_known(tokens, scope) for context in self._contexts)

    @property
    def can_share(self) -> bool:
        """Whether an evaluation may include several sequences, and padding."""
        return not self.keeps_states

    @property
    def identity(self) -> str:
        """What identifies the file that was opened; see `FileKeys`."""
        return self.weights.keys.identity

    @property
    def description(self) -> str:
        """Architecture, number of parameters and quantization."""
        return self.weights.description

    def metadata(self, key: str) -> str | None:
        """Return a metadata entry of the file as text; None if there is none."""
        return self.weights.metadata(key)

    def facts(self) -> ModelFacts:
        """Return facts about the weights."""
        return self.weights.facts

    @property
    def is_disturbed(self) -> bool:
        """Whether the latest evaluation used fewer threads than on an idle machine."""
        return any(context.is_disturbed for context in self._contexts)

    def attended(self, n_tokens: int) -> float:
        """Return how many of `n_tokens` cached tokens a position attends to, averaged over the layers."""
        facts = self.weights.facts
        if facts.window is None or n_tokens <= facts.window:
            return n_tokens
        return n_tokens - facts.windowed_share * (n_tokens - facts.window)

    def prepare(self, batch: Sequence[Prepared]) -> Sequence[int | ContextFullError]:
        """Make room for requests; return for each its number of cached tokens, or why there is no room.

        Raises ValueError for an impossible request, on which llama.cpp would abort the process.
        """
        for _, request, _ in batch:
            self.check(request)
        if self.keeps_states:
            return [self._prepare_alone(entry) for entry in batch]
        return self._contexts[0].cache.prepare_all(batch)

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests; return a view of the logits of each, valid until the next call.

        The views have shape [n_scored, V]. Raises EvaluationAbortedError if `abort` was called, and
        EvaluationError, MemoryFullError or ScoresError if llama.cpp failed or the logits are not finite; in
        the latter case the KV cache is empty.
        """
        context = self._context(batch[0][0])
        assert context is not None  # prepared
        return context.evaluate(batch, n_padding)

    def forward(self, request: ForwardRequest, number: int = -1) -> Logits:
        """Prepare and evaluate a single request. Raises ContextFullError if it has no room."""
        (n_cached,) = self.prepare([(number, request, 0)])
        if isinstance(n_cached, ContextFullError):
            raise n_cached
        while request.n_tokens - n_cached > self.batch_size:
            n_cached = min(n_cached + self.batch_size, request.n_before)
            self.evaluate([(number, request.prefill(n_cached))])
        return self.evaluate([(number, request)])[0]

    def hidden(self, number: int) -> HiddenRows | None:
        """Return the hidden rows that a request has asked for with `rows_from`, valid until the next one."""
        context = self._context(number)
        return None if context is None else context.hidden(number)

    def release(self, number: int) -> None:
        """End a sequence. Its cached tokens may serve others until their room is needed."""
        context = self._context(number)
        if context is None:
            return
        context.cache.release(number)
        idle = [each for each in self._contexts if not each.cache.running]
        if len(idle) > 1:  # the last one was opened at a peak
            idle[-1].cache.store_finished(NO_LIMIT)
            self._contexts.remove(idle[-1])
            idle[-1].close()

    def forget(self) -> None:
        """Empty the KV cache and the store, as if nothing had been evaluated."""
        for context in self._contexts:
            context.clear()

    def recover(self) -> str | None:
        """Check the cache while no sequence runs. If it contradicts itself, empty it and return how."""
        faults = [context.recover() for context in self._contexts]
        return next((fault for fault in faults if fault is not None), None)

    def store_finished(self, n_most: int = NO_LIMIT) -> int:
        """Copy some tokens of finished sequences to the store; return how many, 0 = none is left."""
        return sum(context.cache.store_finished(n_most) for context in self._contexts)

    def abort(self) -> None:
        """Abort the running evaluation, or otherwise the next one; may be called from any thread."""
        self._abort.set()

    def cached(self, number: int) -> CachedSequence | None:
        """Return the cached tokens of a sequence; None before its first request."""
        context = self._context(number)
        return None if context is None else context.cache.running[number]

    def cache_use(self) -> tuple[int, int]:
        """Return the numbers of used and of all KV cells, in all contexts; may be called from any thread."""
        caches = [context.cache for context in list(self._contexts)]
        return sum(cache.n_used for cache in caches), sum(cache.size for cache in caches)

    def try_memory(self) -> MemoryFacts:
        """Measure by a trial how large the KV cache is and how it rolls back. Empties the KV cache."""
        n_tokens = min(N_TEXT + N_DRAFT, self.context_size)
        n_draft = min(N_DRAFT, n_tokens // 2)
        n_text, n_right = n_tokens - n_draft, n_tokens - min(N_REJECTED, n_draft)
        tokens, context, sizes = np.ones(n_tokens, dtype=np.int32), self._contexts[0], []
        try:
            for n in (1, n_text):
                self.forget()
                self.forward(ForwardRequest(TARGET, tokens[:n]))
                seq_id = context.cache.running[-1].seq_id
                sizes.append(int(lib.llama_state_seq_get_size(context.pointer, seq_id)))
            per_token = (sizes[1] - sizes[0]) / max(1, n_text - 1)
            self.forward(ForwardRequest(TARGET, tokens, min(n_draft + 1, self.max_scored)))
            tokens[n_right:] = 0
            (n_kept,) = self.prepare([(-1, ForwardRequest(TARGET, tokens), 0)])
            n_kept = n_kept if isinstance(n_kept, int) else 0
            fixed_bytes = max(0, round(sizes[0] - per_token))
            attention = attention_bytes_per_token(self.weights, self.options)
            return MemoryFacts(per_token, fixed_bytes, n_right, n_kept, attention)
        finally:
            self.forget()
            self.release(-1)

    def why_inexact(self) -> str | None:
        """Return why logits may depend on what is evaluated or cached beside them, and a remedy.

        None if they cannot, because our kernels compute everything: a trial shows it. Empties the KV cache.
        """
        reason = None
        if runtime.kernels().level is None:
            reason = runtime.kernels().describe()
        elif leaves_main_memory(self.options, self.weights.devices):
            reason = "layers are computed on other devices; use --gpu-layers 0, and no --rpc"
        elif self.options.flash_attention == "off":
            reason = "flash attention is off; drop --flash-attn off"
        elif not self.weights.suits_kernels:
            reason = "some weights have a type that llamaspec's kernels do not take; use another quantization"
        elif not (self._contexts[0].flash_attention and self._kernels_compute_everything()):
            kinds = f"{self.options.cache_type_k} keys and {self.options.cache_type_v} values"
            remedy = "use another model" if kinds == "f16 keys and f16 values" else "use f16 or q8_0 for both"
            reason = f"llama.cpp computes a part of this model with {kinds}; {remedy}"
        return reason

    def _kernels_compute_everything(self) -> bool:
        """Return whether our kernels compute all products of a wide evaluation and of a single position.

        llama.cpp computes states: they must give a single position the bits of a wide evaluation.
        """
        tokens, n_missed = np.ones(min(N_WIDE + 1, self.context_size), dtype=np.int32), library.n_missed
        counts = [library.n_products]

        def logits(n: int) -> Logits:
            found = self.forward(ForwardRequest(TARGET, tokens[:n])).copy()
            counts.append(library.n_products)
            return found

        try:
            self.forget()
            logits(len(tokens) - 1)
            of_one = of_all = logits(len(tokens))  # behind the others, which are cached
            if self.keeps_states:
                self.forget()
                of_all = logits(len(tokens))
        finally:
            self.forget()
            self.release(-1)
        wide, single = np.diff(counts)[:2]
        return np.array_equal(of_one, of_all) and library.n_missed == n_missed and bool(wide >= single > 0)

    def check(self, request: ForwardRequest) -> None:
        """Raise ValueError if llama.cpp would abort the process."""
        if not 0 < request.n_tokens <= self.context_size:
            raise ValueError(f"{request.n_tokens} tokens do not fit a context of {self.context_size}")
        for tokens in (request.tokens, request.draft):
            # As unsigned numbers negative ones are large: one pass over the array instead of two.
            text = tokens if self.projector is None else without_pictures(tokens)
            if len(text) and int(np.maximum.reduce(text.view(np.uint32))) >= self.vocabulary.size:
                raise ValueError(f"token ids must be from 0 to {self.vocabulary.size - 1}")

    def close(self) -> None:
        """Free everything. Later calls do nothing."""
        for context in self._contexts:
            context.close()
        self.weights.close()

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, options: ModelOptions) -> Context:
        """Open a context for sequences."""
        if self.projector is not None:
            from llamaspec.llama.picture_context import PictureContext

            return PictureContext(self.weights, options, self.projector, self._abort, self.store)
        if not options.heads and not options.hidden_layers:
            return Context(self.weights, options, abort=self._abort, store=self.store)
        from llamaspec.llama.row_contexts import TargetContext  # drafts read its hidden rows

        return TargetContext(self.weights, options, abort=self._abort, store=self.store)

    def _context(self, number: int) -> Context | None:
        """Return the context that holds a sequence; None before its first request."""
        for context in self._contexts:
            if number in context.cache.running:
                return context
        return None

    def _prepare_alone(self, entry: Prepared) -> int | ContextFullError:
        """Prepare a request in its own context: the free one that holds most of its tokens, or a new one."""
        number, request, _ = entry
        context = self._context(number)
        if context is None:
            free = [context for context in self._contexts if not context.cache.running]
            if not free and len(self._contexts) >= N_SEQUENCES:
                return ContextFullError(f"{N_SEQUENCES} completions are running already; wait for one to end")
            if not free:
                # The size is that of the first context: free memory may have changed since.
                try:
                    free = [self._open(replace(self.options, n_ctx=self.context_size))]
                except MemoryFullError as error:  # until another sequence ends and leaves its context
                    return ContextFullError(str(error))
                self._contexts += free
            context = max(free, key=lambda each: each.cache.n_known(request.reusable, request.scope))
        return context.cache.prepare_all([entry])[0]
