"""Drafts for one target that are no models by themselves: which files they are, whether they can be used."""

from __future__ import annotations

from pathlib import Path

from llamaspec.errors import PairError
from llamaspec.llama.gguf_tensors import read_tensors
from llamaspec.llama.layer_rows import has_layer_rows
from llamaspec.llama.nextn import EAGLE, can_compute_heads

READS = {  # by architecture
    "gemma4-assistant": "the target's KV cache",
    EAGLE: "hidden rows of the target",
}
DFLASH = "dflash"


def what_it_reads(path: Path) -> str | None:
    """What a prediction head in a file of its own reads of its target; None for other files.

    Raises
    ------
    PairError
        It is one that cannot be used.
    """
    try:
        architecture = read_tensors(path).texts.get("general.architecture", "")
    except OSError:
        return None  # what is wrong is said by whoever loads the file
    if architecture == DFLASH:
        raise PairError(
            f"{path} drafts by DFlash, which llamaspec does not have; name an EAGLE-3 or a draft model"
        )
    if architecture not in READS:
        return None
    if not can_compute_heads() or (architecture == EAGLE and not has_layer_rows()):
        raise PairError(
            f"{path} is a prediction head, which this build of llama.cpp cannot compute; update it"
        )
    return READS[architecture]
