"""What a model file says about itself, for lists of models that are not loaded."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from llama_cpp import llama_cpp as lib

from llamaspec.llama.gguf_file import file_parts, read_gguf

_FILE_TYPES = {  # general.file_type -> "Q4_K_M"
    value: name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
    for name, value in vars(lib).items()
    if name.startswith("LLAMA_FTYPE_") and isinstance(value, int)
}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Metadata of a model; a text is empty and a number 0 if the file lacks it."""

    architecture: str
    basename: str  # name of the family, such as "Qwen2.5-Coder"
    size: str  # of its parameters, such as "1.5B"
    quantization: str  # such as "Q4_K_M"
    n_bytes: int  # of all parts of the file
    context_length: int  # tokens that the model was trained on
    embedding_length: int
    block_count: int
    template: str  # the source of its chat template


def file_facts(path: Path) -> FileFacts:
    """Read the facts; OSError if the file cannot be read. A file that has not changed is read once."""
    found = path.stat()
    return _facts(path, found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=256)
def _facts(path: Path, _changed: int, _n_bytes: int) -> FileFacts:
    found = read_gguf(path)
    return FileFacts(
        architecture=found.architecture,
        basename=found.text("general.basename"),
        size=found.text("general.size_label"),
        quantization=_FILE_TYPES.get(found.number("general.file_type", -1), ""),
        n_bytes=sum(part.stat().st_size for part in file_parts(path)),
        context_length=found.number("context_length"),
        embedding_length=found.number("embedding_length"),
        block_count=found.number("block_count"),
        template=found.text("tokenizer.chat_template"),
    )
