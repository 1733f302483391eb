"""EAGLE-3: a draft in a file of its own that reads the hidden rows of three of the target's layers.

An encoder makes one row of the three, and the draft's only layer reads it with the token behind it, as a
prediction head does. llama.cpp exports the functions for it without bindings in Python, and ends the process
where it is asked for what a target does not have: so all is checked before. tests/llama/test_eagle.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.errors import ModelFileError, PairError
from llamaspec.llama.batch import Batch, Segment
from llamaspec.llama.cells import Rows
from llamaspec.llama.context import EAGLE_BATCH, Context
from llamaspec.llama.gguf_tensors import read_tensors
from llamaspec.llama.head import Head
from llamaspec.llama.layer_rows import HAVE_LAYER_ROWS, layers_read
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.nextn import EAGLE
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.weights import Weights


class Encoder:
    """Makes one row of the inputs of several layers.

    Parameters
    ----------
    context : Context
        Of the draft.
    width : int
        Of the inputs side by side.
    """

    def __init__(self, context: Context, width: int) -> None:
        self._context, self.width = context, width
        self._batch = Batch(context.batch_size, width, with_tokens=False)

    def __call__(self, rows: Rows) -> Rows:
        """Rows [n, width] as [n, E], n at most the draft's batch."""
        # It knows no positions; llama.cpp wants those that come next, of some sequence.
        start = lib.llama_memory_seq_pos_max(lib.llama_get_memory(self._context.pointer), 0) + 1
        nothing = np.zeros(len(rows), dtype=np.int32)
        self._context.encode(self._batch.fill([Segment(0, start, nothing, len(rows), rows)]))
        return self._context.hidden_rows(len(rows)).copy()


def open_eagle(weights: Weights, target: LlamaModel, options: ModelOptions) -> Head:
    """The draft over its own weights; the target notes from now on what it reads.

    Raises
    ------
    PairError
        It was made for another target, or llama.cpp does not hand out this target's layers.
    """
    layers, width = layers_read(weights.pointer), lib.llama_model_n_embd(target.weights.pointer)
    n_layers = lib.llama_model_n_layer(target.weights.pointer)
    fits = target_width(weights) == width and all(0 <= layer < n_layers for layer in layers)
    if not fits or (not is_complete(weights) and weights.hidden_size != width):
        raise PairError(f"{weights.path} drafts for another target than {target.path}; name that")
    architecture = target.weights.architecture
    if architecture not in HAVE_LAYER_ROWS:
        raise PairError(
            f"{weights.path} needs hidden rows that llama.cpp does not hand out for {architecture!r}; "
            "name a draft model"
        )
    context = target.context_beside(weights, options)
    target.keep_layers(layers)
    return Head(context, scored_only=False, encoder=Encoder(context, len(layers) * width))


def target_width(weights: Weights) -> int:
    """The size of the hidden rows that it reads."""
    return int(weights.metadata(f"{EAGLE}.target_hidden_size") or 0)


def is_complete(weights: Weights) -> bool:
    """Whether it has an embedding and an output of its own; else it uses the target's."""
    return {"token_embd.weight", "output.weight"} <= read_tensors(weights.path).names


def try_eagle(weights: Weights, options: ModelOptions) -> None:
    """Use a draft without its target, as far as that is possible.

    Raises
    ------
    ModelFileError
        llama.cpp would end the process.
    """
    has_map = "d2t" in read_tensors(weights.path).names
    if lib.llama_model_n_layer(weights.pointer) != 1 or (has_map and not is_complete(weights)):
        raise ModelFileError(f"{weights.path} is no sound EAGLE-3; download or convert it again")
    if not is_complete(weights):
        return
    context = Context(weights, replace(options, n_ctx=EAGLE_BATCH, heads=True), head=0)
    encode = Encoder(context, len(layers_read(weights.pointer)) * target_width(weights))
    rows = encode(np.zeros((2, encode.width), dtype=np.float32))
    ends = np.array([0, weights.vocabulary.size - 1], dtype=np.int32)
    context.decode([Segment(0, 0, ends, 2, rows)])
    context.close()
