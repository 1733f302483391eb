"""Looks at a model file before llama.cpp does, which would abort or explain itself badly.

Reads the first bytes only.
"""

from __future__ import annotations

import struct
from pathlib import Path

from llamaspec.errors import ModelFileError
from llamaspec.files import read_beginning

_HEADER = struct.Struct("<4sIqq")  # magic, version, tensors, metadata entries


def check_gguf(path: Path) -> None:
    """Refuse what is not a whole GGUF model.

    Raises
    ------
    ModelFileError
        With the reason and the remedy.
    """
    try:
        header = read_beginning(path, _HEADER.size)
    except FileNotFoundError:
        raise ModelFileError(f"no such model file: {path}; check the path") from None
    except IsADirectoryError:
        raise ModelFileError(f"{path} is a directory; name the .gguf file inside it") from None
    except OSError as error:
        raise ModelFileError(
            f"cannot read {path}: {error.strerror or error}; name a readable file"
        ) from error
    if header[:4] != b"GGUF":
        raise ModelFileError(
            f"{path} is not a GGUF file; convert the model with llama.cpp's convert_hf_to_gguf.py"
        )
    if len(header) < _HEADER.size:
        raise ModelFileError(f"{path} is cut short; download it again")
    _, version, n_tensors, n_entries = _HEADER.unpack(header)
    if version not in (2, 3) or n_entries < 0 or n_tensors < 0:
        raise ModelFileError(
            f"{path} has GGUF version {version}, which llama.cpp does not read; convert it anew"
        )
    if n_tensors == 0:
        raise ModelFileError(f"{path} holds only a vocabulary and no weights; give the model itself")
