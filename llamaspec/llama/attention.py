"""Attention alone, as a model of some shape computes it in llama.cpp, without that model.

A tiny model of the same heads is written, whose matrices all pick units and add nothing up: whatever differs
between two evaluations is attention's, to the bit. Its depth is not read but copied, so a few thousand tokens
cost milliseconds. Another file of zeros tells what weights cost. Only times; `measure/attention_choice.py`
decides.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.errors import LlamaspecError
from llamaspec.llama import runtime
from llamaspec.llama.batch import Batch, Segment
from llamaspec.llama.facts import active_parameters
from llamaspec.llama.gguf_tensors import read_tensors
from llamaspec.llama.options import CACHE_TYPES, FLASH_ATTENTION, ModelOptions

READ = 128  # tokens that are read; deeper contexts are copies of them
WIDEST = 64  # positions of the widest evaluation
N_LAYERS = 2  # so that keys and values do not all stay near the processor
N_TOKENS, WIDTH = 64, 256  # of the tiny model
N_ZEROS = 1 << 24  # weights of 2 bytes
_ALIGNMENT = 32
_F32, _F16 = 0, 1  # ggml types
_UNLIKE = ("attention.sliding_window", "attention.key_length_mla", "attention.kv_lora_rank")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention of a model costs depends on."""

    n_layers: int  # with attention
    n_heads: int
    n_kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model file that is not loaded, as far as its speed depends on it."""

    shape: AttentionShape
    trained_context_size: int
    n_bytes: int  # of the file
    n_read_bytes: int  # of weights that one token reads
    n_parameters: int  # that one token uses

    @property
    def kv_bytes_per_token(self) -> float:
        """Of keys and values in 16 bits."""
        shape = self.shape
        return 2.0 * shape.n_layers * shape.n_kv_heads * 2 * shape.head_size


def model_size(path: Path) -> ModelSize | None:
    """Look at a file; None where its attention is of another kind than all of Llama's layers have."""
    try:
        found, n_bytes = read_tensors(path), path.stat().st_size
    except OSError:
        return None  # whoever needs the file says why
    architecture = found.texts.get("general.architecture", "")

    def number(key: str, default: int = 0) -> int:
        return found.numbers.get(f"{architecture}.{key}", default)

    n_heads, width = number("attention.head_count"), number("embedding_length")
    n_kv_heads = number("attention.head_count_kv")
    if not (n_heads and n_kv_heads and width and found.n_parameters) or any(map(number, _UNLIKE)):
        return None
    size = number("attention.key_length", width // n_heads)
    shape = AttentionShape(
        n_layers=max(1, number("block_count") // max(1, number("full_attention_interval", 1))),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_size=size,
    )
    if number("attention.value_length", size) != size or not _is_possible(shape):
        return None
    texts: Mapping[str, object] = {**found.texts, **found.numbers}
    n_all = found.n_parameters
    n_used = active_parameters(lambda key: str(texts[key]) if key in texts else None, n_all) or n_all
    return ModelSize(shape, number("context_length"), n_bytes, round(n_bytes * n_used / n_all), n_used)


def _is_possible(shape: AttentionShape) -> bool:
    """What llama.cpp would not abort on."""
    return (
        shape.n_heads % shape.n_kv_heads == 0
        and shape.n_heads <= 512
        and shape.head_size % 32 == 0
        and shape.head_size <= 512
        and shape.n_heads * shape.head_size <= 1 << 16
        and shape.n_kv_heads * shape.head_size <= 1 << 14
    )


def write_model(path: Path, shape: AttentionShape, n_zeros: int = 0) -> None:
    """A Llama of this attention whose other matrices pick units.

    With zeros, which take no place on the disk, it costs what so many weights cost.
    """
    n_ffn = max(32, n_zeros // (3 * WIDTH * N_LAYERS))
    random = np.random.default_rng(0)
    n_query, n_key = shape.n_heads * shape.head_size, shape.n_kv_heads * shape.head_size
    ones = np.ones(WIDTH, dtype=np.float32)
    tensors: dict[str, npt.NDArray[Any] | tuple[int, ...]] = {
        "token_embd.weight": random.standard_normal((N_TOKENS, WIDTH), dtype=np.float32),
        "output_norm.weight": ones,
        "output.weight": _picking(np.arange(N_TOKENS), WIDTH),
    }
    for layer in range(N_LAYERS):
        block = f"blk.{layer}."
        picks = {"q": (n_query, WIDTH), "k": (n_key, WIDTH), "v": (n_key, WIDTH), "output": (WIDTH, n_query)}
        tensors[block + "attn_norm.weight"] = tensors[block + "ffn_norm.weight"] = ones
        for name, (n_rows, n_columns) in picks.items():
            picked = random.integers(0, n_columns, n_rows)
            tensors[f"{block}attn_{name}.weight"] = _picking(picked, n_columns)
    for layer in range(N_LAYERS):  # at the end, where zeros need not be written
        for name, rows in (("gate", (n_ffn, WIDTH)), ("up", (n_ffn, WIDTH)), ("down", (WIDTH, n_ffn))):
            tensors[f"blk.{layer}.ffn_{name}.weight"] = rows
    metadata: dict[str, str | int | float] = {
        "general.architecture": "llama",
        "llama.context_length": 1 << 20,
        "llama.embedding_length": WIDTH,
        "llama.block_count": N_LAYERS,
        "llama.feed_forward_length": n_ffn,
        "llama.attention.head_count": shape.n_heads,
        "llama.attention.head_count_kv": shape.n_kv_heads,
        "llama.attention.key_length": shape.head_size,
        "llama.attention.value_length": shape.head_size,
        "llama.rope.dimension_count": shape.head_size,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": N_TOKENS,
        "tokenizer.ggml.model": "no_vocab",
    }
    _write(path, metadata, tensors)


def _picking(units: npt.NDArray[np.int64], n_columns: int) -> npt.NDArray[np.float16]:
    """[n, n_columns]: row i gives unit `units[i]`, with the same bits whatever kernel adds up."""
    matrix = np.zeros((len(units), n_columns), dtype=np.float16)
    matrix[np.arange(len(units)), units] = 1.0
    return matrix


def _write(
    path: Path,
    metadata: Mapping[str, str | int | float],
    tensors: Mapping[str, npt.NDArray[Any] | tuple[int, ...]],
) -> None:
    """A GGUF file; a tensor of which only the shape is given is zeros of 2 bytes."""
    head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        head.append(_text(key))
        if isinstance(value, str):
            head.append(struct.pack("<I", 8) + _text(value))
        else:
            head.append(
                struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
            )
    end = 0
    places: list[int] = []
    for name, tensor in tensors.items():
        sizes = tensor if isinstance(tensor, tuple) else tensor.shape
        kind = _F32 if not isinstance(tensor, tuple) and tensor.dtype == np.float32 else _F16
        places.append(end)
        head.append(_text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *reversed(sizes), kind, end))
        end += -(-int(np.prod(sizes)) * (4 if kind == _F32 else 2) // _ALIGNMENT) * _ALIGNMENT
    start = -(-sum(map(len, head)) // _ALIGNMENT) * _ALIGNMENT
    with path.open("wb") as file:
        file.writelines(head)
        for place, tensor in zip(places, tensors.values(), strict=True):
            if not isinstance(tensor, tuple):
                file.seek(start + place)
                file.write(tensor.data)
        file.truncate(start + end)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


class AttentionTrial:
    """The tiny model in one configuration. Close it, or use it as a context manager.

    Parameters
    ----------
    path : Path
        Written by `write_model`.
    options : ModelOptions
        Flash attention, types of keys and values, threads and context count here.

    Raises
    ------
    LlamaspecError
        llama.cpp refuses the configuration.
    """

    def __init__(self, path: Path, options: ModelOptions) -> None:
        runtime.start()
        self._model = self._context = None
        chosen = lib.llama_model_default_params()
        chosen.n_gpu_layers, chosen.use_extra_bufts = 0, False
        self._model = lib.llama_model_load_from_file(os.fsencode(path), chosen)
        parameters = lib.llama_context_default_params()
        parameters.n_ctx = (options.n_ctx or READ) + 2 * WIDEST
        parameters.n_batch = parameters.n_ubatch = READ
        parameters.n_seq_max, parameters.kv_unified = 2, True
        parameters.n_threads = parameters.n_threads_batch = options.threads or runtime.default_threads()
        parameters.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
        parameters.type_k = CACHE_TYPES[options.cache_type_k]
        parameters.type_v = CACHE_TYPES[options.cache_type_v]
        parameters.offload_kqv = parameters.op_offload = False
        if self._model:
            self._context = lib.llama_init_from_model(self._model, parameters)
        if not self._context:
            self.close()
            raise LlamaspecError(f"llama.cpp cannot try attention: {runtime.failure_reason()}")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = Batch(READ, 0)
        self._tokens = np.random.default_rng(1).integers(0, N_TOKENS, READ + WIDEST).astype(np.int32)
        self._decode(0, READ, 0)
        self._depth = READ

    def deepen(self, depth: int) -> None:
        """Let the context hold this many tokens: READ, doubled as often as it takes."""
        while self._depth < depth:
            size = lib.llama_state_seq_get_size(self._context, 0)
            state = (ctypes.c_uint8 * size)()
            lib.llama_state_seq_get_data(self._context, state, size, 0)
            if not lib.llama_state_seq_set_data(self._context, state, size, 1):
                raise LlamaspecError(f"llama.cpp cannot copy a context: {runtime.failure_reason()}")
            lib.llama_memory_seq_cp(self._memory, 1, 0, -1, -1)
            lib.llama_memory_seq_rm(self._memory, 1, -1, -1)
            self._depth *= 2

    def seconds(self, width: int) -> float:
        """What evaluating so many positions behind the context takes."""
        start = time.perf_counter()
        self._decode(READ, width, 1)
        taken = time.perf_counter() - start
        lib.llama_memory_seq_rm(self._memory, 0, READ, -1)
        return taken

    def logits(self, widths: Sequence[int]) -> npt.NDArray[np.float32]:
        """[n, N_TOKENS] of the positions behind the context, evaluated in batches of these widths."""
        rows, start = [], READ
        for width in widths:
            self._decode(start, width, width)
            view = np.ctypeslib.as_array(lib.llama_get_logits(self._context), (width, N_TOKENS))
            rows.append(view.copy())
            start += width
        lib.llama_memory_seq_rm(self._memory, 0, READ, -1)
        return np.concatenate(rows)

    def close(self) -> None:
        """Free everything; more than once is allowed."""
        if self._context:
            lib.llama_free(self._context)
        if self._model:
            lib.llama_model_free(self._model)
        self._model = self._context = None

    def __enter__(self) -> AttentionTrial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _decode(self, start: int, width: int, n_scored: int) -> None:
        segment = Segment(0, start, self._tokens[start : start + width], n_scored)
        status = lib.llama_decode(self._context, self._batch.fill([segment]))
        if status:
            raise LlamaspecError(f"llama.cpp cannot try attention (code {status})")
