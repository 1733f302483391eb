"""Writes small models as GGUF files: matrices as Q8_0, norms as float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

QUANTIZATION_VERSION = 2  # ggml's current layout of quantised blocks
_VOCABULARY = "tokenizer."  # prefix of the vocabulary's metadata


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Iterable[tuple[str, NDArray[np.float32]]],
    describe: Callable[[GGUFWriter], None],
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
) -> None:
    """Write a file in one step; `describe` adds metadata. Vectors stay float32, matrices become `kind`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another file, renamed at the end: processes that have mapped the old one can go on using it.
    partial = path.with_suffix(".partial")
    try:
        writer = GGUFWriter(partial, architecture)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_quantization_version(QUANTIZATION_VERSION)
        describe(writer)
        for name, weight in tensors:
            if weight.ndim == 1:
                writer.add_tensor(name, weight)
                continue
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def copy_vocabulary(writer: GGUFWriter, source: Path) -> None:
    """Add the vocabulary and the chat template of another file."""
    for key, field in GGUFReader(source).fields.items():
        if not key.startswith(_VOCABULARY):
            continue
        kind, value = field.types[0], field.contents()
        if kind == GGUFValueType.ARRAY:
            writer.add_key_value(key, value, kind, sub_type=field.types[-1])
        else:
            writer.add_key_value(key, value, kind)
