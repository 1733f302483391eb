"""llama.cpp's own quantisation, through the bindings.

The file appears under its name only when it is complete.
"""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp.llama_cpp as lib

from llamaspec.llama import runtime

FILE_TYPES = {
    "Q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_K_M": lib.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


def quantize(path: Path, kind: str, n_threads: int = 0) -> Path:
    """Quantise a float file, unless that is done already: the new file, beside it.

    Raises
    ------
    OSError
        llama.cpp refuses.
    """
    name = path.stem.removesuffix("-F16").removesuffix("-F32")
    quantized = path.with_name(f"{name}-{kind}.gguf")
    if quantized.exists() and quantized.stat().st_mtime > path.stat().st_mtime:
        return quantized
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[kind]
    parameters.nthread = n_threads  # 0: all cores
    unfinished = quantized.with_name(quantized.name + ".part")
    runtime.start()  # which also silences llama.cpp's log
    runtime.clear_errors()
    try:
        if lib.llama_model_quantize(os.fsencode(path), os.fsencode(unfinished), parameters):
            raise OSError(f"llama.cpp cannot quantise {path} to {kind}: {runtime.failure_reason()}")
        unfinished.replace(quantized)
    finally:
        unfinished.unlink(missing_ok=True)
    return quantized
