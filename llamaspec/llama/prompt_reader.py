"""Reads long prompts with the weights as they lie in the file, where that is faster than with repacked ones.

llama.cpp rearranges 4-bit weights for decoding. With the weights as they lie in the file, some processors
have faster kernels for many positions at once (AVX-512 with VNNI: 1.3 to 1.5 times as fast for Q4_K). The
file is mapped anyway, so a second model over it costs only its KV cache. What it has read reaches the context
that decodes through the prefix store. Which one is faster is measured once, on the first long prompt: both
read parts of it. After that only the number of new tokens decides, so a text still follows from its seed.
tests/llama/test_prompt_reader.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from llamaspec.errors import ContextFullError, LlamaspecError, MemoryFullError
from llamaspec.llama import runtime
from llamaspec.llama.context import Context, leaves_main_memory
from llamaspec.llama.kv_cache import KVCache, Prepared
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.weights import Weights
from llamaspec.values import ForwardRequest

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
    def gain(self) -> float:
        """How many times as fast it is to read apart."""
        speeds = {apart: self.n_tokens[apart] / max(self.seconds[apart], 1e-9) for apart in (False, True)}
        return speeds[True] / max(speeds[False], 1e-9)


class PromptReader:
    """Decides which prompts are read apart, and reads them.

    `main` is the KV cache of the context that decodes. `open_context` loads the weights as they lie in the
    file and opens a context over them; LlamaspecError if there is no room.
    """

    def __init__(self, main: KVCache, open_context: Callable[[], tuple[Weights, Context]]) -> None:
        self._main, self._open = main, open_context
        self._opened: tuple[Weights, Context] | None = None
        self._has_failed = False  # it could not be opened
        self.gain: float | None = None  # times as fast as with repacked weights; None = not known yet
        self._ends: dict[int, int] = {}  # by row: tokens of its prompt that are read apart
        self._read: dict[int, int] = {}  # by row: tokens of its prompt that were known when it was read
        self._trial: Trial | None = None

    @property
    def chunk(self) -> int | None:
        """Positions that are read at once while both ways are measured."""
        return None if self._trial is None else PART

    @property
    def context(self) -> Context:
        """The context that reads, once it is open."""
        assert self._opened is not None
        return self._opened[1]

    def is_reading(self, row: int) -> bool:
        """Whether the next tokens of a row are read apart."""
        return row in self._ends

    def prepare(self, entry: Prepared, n_cached: int) -> int | ContextFullError:
        """Make room for what is read apart of a prompt, or take it over where all of that is read.

        `n_cached` tokens are in the main context. Returns how many need not be evaluated any more.
        """
        row, request, _ = entry
        n_before = len(request.tokens) - request.n_logits
        while row in self._ends or self._begin(row, n_cached, n_before):
            end = min(self._ends[row], n_before)
            beginning = ForwardRequest(request.model, request.tokens[:end], n_logits=0)
            (n_read,) = self._cache.prepare_all([(row, beginning, 0)])
            if isinstance(n_read, int):
                if n_read < end:
                    return n_read
                self._cache.store_row(row)
            self._end(row)
            (answer,) = self._main.prepare_all([entry])
            if not isinstance(answer, int):
                return answer
            n_cached = answer
        return n_cached

    def note(self, row: int, n_tokens: int, n_new: int, seconds: float) -> None:
        """Learn from an evaluation of a part of a prompt, up to `n_tokens` tokens."""
        trial = self._trial
        if trial is None or trial.row != row:
            return
        is_apart = self.is_reading(row)
        trial.seconds[is_apart] += seconds
        trial.n_tokens[is_apart] += n_new
        if trial.part(n_tokens) >= N_PARTS:
            self._trial = None
            if min(trial.n_tokens.values()) >= len(APART) * PART:
                self.gain = trial.gain

    def release(self, row: int) -> None:
        """The row has ended."""
        self._end(row)
        self._read.pop(row, None)
        if self._trial is not None and self._trial.row == row:
            self._trial = None

    def forget(self) -> None:
        """Empty the KV cache."""
        if self._opened is not None:
            self.context.clear()

    def close(self) -> None:
        """Free the context and its weights."""
        for each in reversed(self._opened or ()):
            each.close()
        self._opened = None

    def open_if_faster(self) -> None:
        """Open the context that reads, if it is known to be faster."""
        if (self.gain or 0.0) >= MIN_GAIN:
            self.open()

    def open(self) -> bool:
        """Open the context that reads, if there is room for it; else nothing is read apart from now on."""
        if self._opened is None and not self._has_failed:
            try:
                self._opened = self._open()
            except LlamaspecError:
                self._has_failed = True
        return self._opened is not None

    @property
    def _cache(self) -> KVCache:
        cache = self.context.cache
        assert isinstance(cache, KVCache)
        return cache

    def _begin(self, row: int, n_cached: int, n_before: int) -> bool:
        """Whether the next tokens of a row are read apart; if so, the store gets what is known of it."""
        n_new, end = n_before - n_cached, n_before
        if n_new < MIN_TOKENS or n_cached < self._read.get(row, 0):  # what was read here got lost
            return False
        if self.gain is None:
            if self._trial is None and self._main.n_rows == 1 and n_new >= N_PARTS * PART and self.open():
                self._trial = Trial(row, n_cached)
            trial = self._trial
            if trial is None or trial.row != row or trial.part(n_cached) not in APART:
                return False
            end = trial.start + APART.stop * PART
        elif self.gain < MIN_GAIN or not self.open():
            return False
        if n_cached:
            self._main.store_row(row)
        self._ends[row] = end
        return True

    def _end(self, row: int) -> None:
        end = self._ends.pop(row, None)
        if end is not None:
            self._cache.release(row)
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

    def opened() -> tuple[Weights, Context]:
        if runtime.available_bytes() < weights.facts().weights_bytes:  # the file would not stay in memory
            raise MemoryFullError("no room to read prompts apart")
        as_in_file = Weights(weights.path, options)
        try:
            return as_in_file, open_context(as_in_file, options)
        except BaseException:
            as_in_file.close()
            raise

    return PromptReader(main.cache, opened)
