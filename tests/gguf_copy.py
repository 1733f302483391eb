"""A copy of a GGUF file with other metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys


def rewrite(source: Path, path: Path, entries: Mapping[str, str]) -> None:
    """Write a file to another path with some new or changed entries."""
    reader = GGUFReader(source)
    writer = GGUFWriter(path, str(reader.fields[Keys.General.ARCHITECTURE].contents()))
    writer.data_alignment = int(reader.alignment)
    for entry in reader.fields.values():
        if entry.name.startswith("GGUF.") or entry.name in {Keys.General.ARCHITECTURE, *entries}:
            continue  # the writer adds the first two itself
        part = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(entry.name, entry.contents(), entry.types[0], sub_type=part)
    for key, value in entries.items():
        writer.add_string(key, value)
    for tensor in reader.tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()
