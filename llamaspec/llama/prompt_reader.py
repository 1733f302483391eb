"""Reads long prompts with the weights as they are in the file, if that is faster than with repacked ones.

llama.cpp rearranges 4-bit weights for decoding. For the weights as they are in the file, some processors have
faster kernels for many positions at once (AVX-512 with VNNI: 1.3 to 1.5 times as fast for Q4_K). The file is
mapped anyway, so a second model over it costs only its KV cache. What it has read reaches the context that
decodes through the prefix store. Which one is faster is measured once, on the first long prompt: both read
parts of it. After that only the number of new tokens decides, so a completion still follows from its seed.
tests/llama/test_prompt_reader.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace

from llamaspec.errors import ContextFullError, LlamaspecError, MemoryFullError
from llamaspec.llama import resources, runtime
from llamaspec.llama.context import Context, leaves_main_memory
from llamaspec.llama.kv_cache import KVCache, Prepared
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.weights import Weights
from llamaspec.values import ForwardRequest, Logits

NEVER_REPACKED = frozenset(map(str, (0, 1, 7, 32)))  # general.file_type of F32, F16, Q8_0 and BF16
MIN_TOKENS = 64  # new tokens of a prompt that is read apart
MIN_GAIN = 1.1  # times as fast as with repacked weights
PART = 96  # tokens of each part of the prompt with which both ways are measured
N_PARTS, APART = 4, range(1, 3)  # these are read apart


@dataclass(slots=True, eq=False)
class Trial:
    """Times both ways on parts of one prompt: the first and last as usual, those between them apart.

    So a part's depth in the prompt, which makes tokens dearer, favours neither way.
    """

    row: int
    start: int  # tokens that were known before
    seconds: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})  # by whether apart
    n_tokens: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})

    def part(self, n: int) -> int:
        """Which part comes behind `n` tokens."""
        return (n - self.start) // PART

    @property
    def gain(self) -> float | None:
        """How many times as fast it is to read apart; None if parts were skipped."""
        if min(self.n_tokens.values()) < len(APART) * PART:
            return None
        usual, apart = (self.n_tokens[key] / max(self.seconds[key], 1e-9) for key in (False, True))
        return apart / max(usual, 1e-9)


class PromptReader:
    """Decides which prompts are read apart, and reads them.

    `main` is the context that decodes. `open_context` opens a context over the weights as they are in the
    file; LlamaspecError if there is no room.
    """

    def __init__(self, main: Context, open_context: Callable[[], Context]) -> None:
        self._main, self._open = main, open_context
        self._opened: Context | None = None
        self._has_failed = False  # it could not be opened
        self.gain: float | None = None  # times as fast as with repacked weights; None = not known yet
        self._ends: dict[int, int] = {}  # by row: tokens of its prompt that are read apart
        self._read: dict[int, int] = {}  # by row: the same, once they have been read
        self._trial: Trial | None = None

    @property
    def chunk(self) -> int | None:
        """Positions that are read at once while both ways are measured."""
        return None if self._trial is None else PART

    def is_reading(self, row: int) -> bool:
        """Whether the next tokens of a row are read apart."""
        return row in self._ends

    def prepare(self, entry: Prepared, answer: int | ContextFullError) -> int | ContextFullError:
        """Make room for what is read apart of a prompt, or take it over if all of that is read.

        `answer` is the main context's. Returns how many tokens need not be evaluated any more.
        """
        row, request, _ = entry
        while isinstance(answer, int) and (row in self._ends or self._begin(row, answer, request)):
            end, cache = min(self._ends[row], request.n_before), _cache(self._context)
            (n_read,) = cache.prepare_all([(row, request.prefill(end), 0)])
            if isinstance(n_read, int):
                if n_read < end:
                    return n_read
                cache.store_row(row)
            self._end(row)
            (answer,) = self._main.cache.prepare_all([entry])
        return answer

    def evaluate(self, row: int, request: ForwardRequest) -> list[Logits]:
        """Evaluate a part of a prompt, apart if that was prepared."""
        is_apart = self.is_reading(row)
        context = self._context if is_apart else self._main
        n_new, begin = request.n_tokens - context.cache.of_row[row].n, time.perf_counter()
        logits = context.evaluate([(row, request)])
        trial = self._trial
        if trial is not None and trial.row == row:
            trial.seconds[is_apart] += time.perf_counter() - begin
            trial.n_tokens[is_apart] += n_new
            if trial.part(request.n_tokens) >= N_PARTS:
                self._trial, self.gain = None, trial.gain
        return logits

    def release(self, row: int) -> None:
        """End a row."""
        self._end(row)
        self._read.pop(row, None)
        if self._trial is not None and self._trial.row == row:
            self._trial = None

    def forget(self) -> None:
        """Empty the KV cache."""
        if self._opened is not None:
            self._opened.clear()

    def close(self) -> None:
        """Free the context and its weights."""
        if self._opened is not None:
            self._opened.close()

    def open_if_faster(self) -> bool:
        """Open the context that reads if it is known to be faster; return whether it is open."""
        return (self.gain or 0.0) >= MIN_GAIN and self._is_open()

    def _is_open(self) -> bool:
        """Open the context that reads; if there is no room for it, nothing is read apart from now on."""
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

    def _begin(self, row: int, n_cached: int, request: ForwardRequest) -> bool:
        """Whether the next tokens of a row are read apart; if so, store what is known of it."""
        end, main = request.n_before, _cache(self._main)
        n_new = end - n_cached
        if n_new < MIN_TOKENS or n_cached < self._read.get(row, 0):  # what was read here got lost
            return False
        if self.gain is None:
            is_long = n_new >= N_PARTS * PART
            if self._trial is None and len(main.of_row) == 1 and is_long and self._is_open():
                self._trial = Trial(row, n_cached)
            trial = self._trial
            if trial is None or trial.row != row or trial.part(n_cached) not in APART:
                return False
            end = trial.start + APART.stop * PART
        elif not self.open_if_faster():
            return False
        if n_cached:
            main.store_row(row)
        self._ends[row] = end
        return True

    def _end(self, row: int) -> None:
        end = self._ends.pop(row, None)
        if end is not None:
            self._context.cache.release(row)
            self._read[row] = end


def make_reader(
    weights: Weights,
    options: ModelOptions,
    main: Context,
    open_context: Callable[[Weights, ModelOptions], Context],
) -> PromptReader | None:
    """What reads long prompts of a model; None if its weights are not repacked, or not computed here."""
    if (
        not (options.reads_apart and options.repack and runtime.repacking_is_safe())
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
            raise MemoryFullError("no room to read prompts apart")
        with closing(Weights(weights.path, options)) as as_in_file:  # the context keeps what it needs
            return open_context(as_in_file, options)

    return PromptReader(main, opened)


def _cache(context: Context) -> KVCache:
    assert isinstance(context.cache, KVCache)  # checked by `make_reader`
    return context.cache
