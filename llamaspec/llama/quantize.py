"""Smaller copies of a model, by llama.cpp's own quantiser: fewer layers, fewer bits.

It cannot be interrupted, and it ends the process on what it does not expect. So it runs in a process of its
own (`llama/quantize_child.py`), which Ctrl-C ends; what it writes has its name only once it is complete.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llama_cpp import llama_cpp as lib

from llamaspec.errors import LlamaspecError, ModelFileError, printable

COPY = "copy"  # in place of a type: the tensors stay as they are
FILE_TYPES = {
    "F16": lib.LLAMA_FTYPE_MOSTLY_F16,
    "Q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q6_K": lib.LLAMA_FTYPE_MOSTLY_Q6_K,
    "Q5_K_M": lib.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "Q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": lib.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q3_K_M": lib.LLAMA_FTYPE_MOSTLY_Q3_K_M,
    "Q2_K": lib.LLAMA_FTYPE_MOSTLY_Q2_K,
}
MOST_CHARACTERS = 127  # of an entry that is added
_POLL_SECONDS = 0.1
_CHILD = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "from llamaspec.llama.quantize_child import main; main()"
)

OnWrite = Callable[[int], None]  # told how many bytes are written


@dataclass(frozen=True, slots=True)
class Copy:
    """What to make of a model.

    Raises
    ------
    ValueError
        There is no such type, or an entry is too long.
    """

    file_type: str = COPY
    pruned: tuple[int, ...] = ()  # layers to leave out, ascending from 0
    texts: Mapping[str, str] = field(default_factory=dict)  # metadata to add
    numbers: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file_type not in (COPY, *FILE_TYPES):
            raise ValueError(f"the type must be one of {', '.join((COPY, *FILE_TYPES))}")
        if list(self.pruned) != sorted(set(self.pruned)) or min(self.pruned, default=0) < 0:
            raise ValueError(f"layers must ascend from 0, got {self.pruned}")
        if any(len(part.encode()) > MOST_CHARACTERS for entry in self.texts.items() for part in entry):
            raise ValueError(f"metadata may have at most {MOST_CHARACTERS} bytes")


def write_copy(
    source: Path, destination: Path, copy: Copy, threads: int = 0, on_write: OnWrite | None = None
) -> None:
    """Write a smaller copy of a model.

    Parameters
    ----------
    source : Path
        A GGUF file, or the first part of one.
    destination : Path
        Appears when it is complete.
    copy : Copy
    threads : int
        0 = all cores.
    on_write : callable, optional
        Called every now and then; what it raises ends the copying.

    Raises
    ------
    ModelFileError
        llama.cpp cannot make this copy; says why.
    """
    unfinished = destination.with_name(destination.name + ".part")
    task = {**asdict(copy), "source": str(source.absolute()), "destination": str(unfinished.absolute())}
    command = [sys.executable, "-I", "-c", _CHILD, json.dumps({**task, "threads": threads})]
    try:
        child = subprocess.Popen(
            [*command, "\n".join(sys.path)],
            stdin=subprocess.PIPE,  # it ends when this process does
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )
    except OSError as error:
        raise LlamaspecError(f"cannot start a process: {error.strerror}; close programs") from error
    try:
        with child:
            try:
                said = _wait(child, unfinished, on_write)
            except BaseException:
                child.kill()
                raise
        if child.returncode or said:
            reason = printable(said) or f"it ended with code {child.returncode}; is the disk full?"
            raise ModelFileError(f"llama.cpp cannot make this copy of {source}: {reason}")
        unfinished.replace(destination)
    finally:
        unfinished.unlink(missing_ok=True)
        unfinished.with_suffix(".renewed").unlink(missing_ok=True)  # of a child that was ended


def _wait(child: subprocess.Popen[bytes], unfinished: Path, on_write: OnWrite | None) -> str:
    """What the child said: nothing where all went well."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_SECONDS)
            assert child.stdout is not None
            return child.stdout.read().decode("utf-8", errors="replace")
        if on_write is not None:
            on_write(unfinished.stat().st_size if unfinished.exists() else 0)
