"""Model files with attention configured as is best here: known from an earlier run, or measured on the spot.

Nothing is measured where it cannot matter: in short contexts, on a GPU, or for attention of another kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import psutil

from llamaspec.errors import LlamaspecError
from llamaspec.llama import runtime
from llamaspec.llama.attention import ModelSize, model_size
from llamaspec.llama.context_size import default_context_size
from llamaspec.llama.options import ModelOptions
from llamaspec.measure.attention import AttentionProbe, measure_attention
from llamaspec.measure.attention_choice import MATTERS, Choice, TextSize, choose
from llamaspec.measure.pair_files import ModelFile
from llamaspec.measure.store import drop_attention, store_attention, stored_attention

LEAST_SECONDS = 1.0  # that measuring may take before a model is loaded
BYTES_PER_SECOND = 10e9  # of a larger model: a tenth of the time that loading takes
THOROUGH_SECONDS = 6.0  # where somebody asked for a measurement
Measure = Callable[[ModelSize, int, float], AttentionProbe]  # (size, threads, seconds)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model file, and why it is loaded so."""

    file: ModelFile
    choice: Choice | None = None  # None: nothing was measured
    is_new: bool = False  # whether it was measured just now
    fault: str | None = None  # why it could not be measured


def _measure(size: ModelSize, n_threads: int, seconds: float) -> AttentionProbe:
    return measure_attention(size.shape, n_threads, seconds, time.perf_counter)


def fitted(
    file: ModelFile,
    *,
    is_draft: bool = False,
    may_measure: bool = True,
    is_thorough: bool = False,
    text: TextSize | None = None,
    n_texts: int = 1,
    measure: Measure = _measure,
) -> Fitted:
    """Choose flash attention and the types of keys and values for a model.

    Parameters
    ----------
    file : ModelFile
    is_draft : bool
    may_measure : bool
        Else only what is known counts.
    is_thorough : bool
        Whether measuring may take some seconds.
    text : TextSize, optional
        The only one that is to be written.
    n_texts : int
        That share the KV cache.
    measure : callable
    """
    size = None if computes_on_gpu(file.options) else model_size(file.path)
    if size is None:
        return Fitted(file)
    n_ctx = file.options.n_ctx or default_context_size(
        size.trained_context_size, size.kv_bytes_per_token, size.n_bytes, runtime.available_bytes()
    )
    if min(n_ctx, n_ctx if text is None else text.n_tokens) <= MATTERS:
        return Fitted(file)
    n_threads = file.options.threads or runtime.default_threads()
    room = psutil.virtual_memory().total
    chosen = partial(choose, size=size, n_ctx=n_ctx, text=text, room=room, is_draft=is_draft, n_texts=n_texts)
    probe = stored_attention(size.shape, n_threads).value
    if probe is not None:
        return _loaded_so(file, chosen(probe))
    if not may_measure:
        return Fitted(file)
    seconds = THOROUGH_SECONDS if is_thorough else max(LEAST_SECONDS, size.n_bytes / BYTES_PER_SECOND)
    try:
        probe = measure(size, n_threads, seconds)
    except (LlamaspecError, OSError) as error:  # a busy machine too
        return Fitted(file, fault=str(error))
    choice = chosen(probe)
    if choice.is_steady:
        store_attention(size.shape, n_threads, probe)
    return replace(_loaded_so(file, choice), is_new=True)


def forget_attention(file: ModelFile) -> bool:
    """Drop what was measured for a model; answers whether there was anything."""
    size = model_size(file.path)
    return size is not None and drop_attention(size.shape, file.options.threads or runtime.default_threads())


def _loaded_so(file: ModelFile, choice: Choice) -> Fitted:
    """The file with the chosen configuration; where flash attention is impossible it stays off."""
    configuration = choice.configuration
    options = replace(
        file.options,
        flash_attention="auto" if configuration.flash_attention == "on" else "off",
        cache_type_k=configuration.cache_type_k,
        cache_type_v=configuration.cache_type_v,
    )
    return Fitted(replace(file, options=options), choice)


def computes_on_gpu(options: ModelOptions) -> bool:
    """Whether a model loaded like this computes on a GPU or on workers, in part at least."""
    return options.workers != () or (runtime.can_offload() and options.offloads)
