"""Processes long prompts with the weights as the file has them, if that is faster than with repacked ones.

llama.cpp repacks 4-bit weights for decoding. Some processors have faster kernels for wide batches if the
weights are not repacked (AVX-512 with VNNI: 1.3 to 1.5 times as fast for Q4_K). The file is mapped anyway, so
a second context over its weights, the prompt context, costs only a KV cache. Its results reach the main
context through the prefix store. Which context is faster is measured once, on the first long prompt: both
process parts of it. After that, the choice depends only on the number of new tokens, so a completion still
follows from its seed. tests/llama/test_prompt_processor.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace

from llamaspec.errors import ContextFullError, LlamaspecError, MemoryFullError
from llamaspec.llama import resources
from llamaspec.llama.context import Context, leaves_main_memory
from llamaspec.llama.kv_cache import KVCache, Prepared
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.weights import Weights
from llamaspec.values import ForwardRequest, Logits

NEVER_REPACKED = frozenset(map(str, (0, 1, 7, 32)))  # general.file_type of F32, F16, Q8_0 and BF16
MIN_TOKENS = 64  # new tokens of a prompt for the prompt context
MIN_GAIN = 1.1  # speed-up by the prompt context for which it is used
PART = 96  # tokens of each part of the measured prompt
N_PARTS, IN_PROMPT_CONTEXT = 4, range(1, 3)  # parts of the measured prompt, and those for the prompt context


@dataclass(slots=True, eq=False)
class Trial:
    """Times both contexts on parts of one prompt: main, prompt, prompt, main.

    Later parts take longer because they attend to more tokens. This order favours neither context.
    """

    number: int  # of the sequence
    start: int  # tokens that were cached before
    # By whether the prompt context processed them:
    seconds: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    n_tokens: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})

    def part(self, n: int) -> int:
        """Return the index of the part that follows `n` tokens."""
        return (n - self.start) // PART

    @property
    def gain(self) -> float | None:
        """Speed-up by the prompt context; None if parts were skipped because they were cached."""
        if min(self.n_tokens.values()) < len(IN_PROMPT_CONTEXT) * PART:
            return None
        main, prompt = (self.n_tokens[key] / max(self.seconds[key], 1e-9) for key in (False, True))
        return prompt / max(main, 1e-9)


class PromptProcessor:
    """Chooses the context for each prompt of a model, and runs the prompt context.

    `main` is the context that decodes. `open_context` opens the prompt context; it raises LlamaspecError if
    there is no room.
    """

    def __init__(self, main: Context, open_context: Callable[[], Context]) -> None:
        self._main, self._open = main, open_context
        self._opened: Context | None = None
        self._has_failed = False  # the prompt context could not be opened
        self.gain: float | None = None  # speed-up by the prompt context; None = not measured yet
        # By the number of the sequence: tokens of its prompt for the prompt context.
        self._ends: dict[int, int] = {}  # while it processes them
        self._processed: dict[int, int] = {}  # afterwards
        self._trial: Trial | None = None

    @property
    def chunk(self) -> int | None:
        """Number of positions to evaluate at once during the measurement; None at other times."""
        return None if self._trial is None else PART

    def is_processing(self, number: int) -> bool:
        """Whether the prompt context processes the next tokens of a sequence."""
        return number in self._ends

    def prepare(self, entry: Prepared, answer: int | ContextFullError) -> int | ContextFullError:
        """Make room in the prompt context for a prompt, or move the processed prompt to the main context.

        `answer` is the main context's. Returns the number of tokens that need no evaluation any more.
        """
        number, request, _ = entry
        while isinstance(answer, int) and (number in self._ends or self._begin(number, answer, request)):
            end, cache = min(self._ends[number], request.n_before), _cache(self._context)
            (n_cached,) = cache.prepare_all([(number, request.prefill(end), 0)])
            if isinstance(n_cached, int):
                if n_cached < end:
                    return n_cached
                cache.store_running(number)
            self._end(number)
            (answer,) = self._main.cache.prepare_all([entry])
        return answer

    def evaluate(self, number: int, request: ForwardRequest) -> list[Logits]:
        """Evaluate a part of a prompt in the context for which it was prepared."""
        is_processing = self.is_processing(number)
        context = self._context if is_processing else self._main
        n_new, begin = request.n_tokens - context.cache.running[number].n, time.perf_counter()
        logits = context.evaluate([(number, request)])
        trial = self._trial
        if trial is not None and trial.number == number:
            trial.seconds[is_processing] += time.perf_counter() - begin
            trial.n_tokens[is_processing] += n_new
            if trial.part(request.n_tokens) >= N_PARTS:
                self._trial, self.gain = None, trial.gain
        return logits

    def release(self, number: int) -> None:
        """End a sequence."""
        self._end(number)
        self._processed.pop(number, None)
        if self._trial is not None and self._trial.number == number:
            self._trial = None

    def forget(self) -> None:
        """Empty the KV cache of the prompt context."""
        if self._opened is not None:
            self._opened.clear()

    def close(self) -> None:
        """Free the prompt context."""
        if self._opened is not None:
            self._opened.close()

    def open_if_faster(self) -> bool:
        """Open the prompt context if it is known to be faster; return whether it is open."""
        return (self.gain or 0.0) >= MIN_GAIN and self._is_open()

    def _is_open(self) -> bool:
        """Open the prompt context if it is not open; after a failure it is not tried again."""
        if self._opened is None and not self._has_failed:
            try:
                self._opened = self._open()
            except LlamaspecError:
                self._has_failed = True
        return self._opened is not None

    @property
    def _context(self) -> Context:
        assert self._opened is not None
        return self._opened

    def _begin(self, number: int, n_cached: int, request: ForwardRequest) -> bool:
        """Whether the prompt context shall process the next tokens; if so, store those before them."""
        end, main = request.n_before, _cache(self._main)
        n_new = end - n_cached
        if n_new < MIN_TOKENS or n_cached < self._processed.get(number, 0):  # the store had no room for them
            return False
        if self.gain is None:
            is_long = n_new >= N_PARTS * PART
            if self._trial is None and len(main.running) == 1 and is_long and self._is_open():
                self._trial = Trial(number, n_cached)
            trial = self._trial
            if trial is None or trial.number != number or trial.part(n_cached) not in IN_PROMPT_CONTEXT:
                return False
            end = trial.start + IN_PROMPT_CONTEXT.stop * PART
        elif not self.open_if_faster():
            return False
        if n_cached:
            main.store_running(number)
        self._ends[number] = end
        return True

    def _end(self, number: int) -> None:
        """End a sequence in the prompt context."""
        end = self._ends.pop(number, None)
        if end is not None:
            self._context.cache.release(number)
            self._processed[number] = end


def make_processor(
    weights: Weights,
    options: ModelOptions,
    main: Context,
    open_context: Callable[[Weights, ModelOptions], Context],
) -> PromptProcessor | None:
    """Return a processor for a model; None if its weights are not repacked, or other devices hold layers."""
    if (
        not (options.prompt_context and weights.may_be_repacked)
        or options.heads
        or not isinstance(main.cache, KVCache)
        or not main.cache.can_store
        or leaves_main_memory(weights, options)
        or (weights.metadata("general.file_type") or "0") in NEVER_REPACKED
    ):
        return None
    options = replace(options, repack=False, n_ctx=main.context_size, n_cells=None, max_scored=2)

    def opened() -> Context:
        if resources.available_bytes() < weights.facts.weights_bytes:  # the file would not stay in memory
            raise MemoryFullError("no room for the prompt context")
        with closing(Weights(weights.path, options)) as original:  # the context keeps them alive
            return open_context(original, options)

    return PromptProcessor(main, opened)


def _cache(context: Context) -> KVCache:
    assert isinstance(context.cache, KVCache)  # checked by `make_processor`
    return context.cache
