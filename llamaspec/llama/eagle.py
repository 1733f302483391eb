"""EAGLE-3: a draft in a file of its own that reads the hidden rows of three of the target's layers.

An encoder makes one row of the three, and the draft's only layer reads it with the token behind it, as a
prediction head does. llama.cpp exports the functions for it without bindings in Python, and ends the process
where it is asked for what a target does not have: so all is checked before. tests/llama/test_eagle.py.
"""

from __future__ import annotations

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.errors import PairError
from llamaspec.llama.batch import Batch, Stretch
from llamaspec.llama.context import Context
from llamaspec.llama.head import Head
from llamaspec.llama.hidden_rows import Rows
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
        self._context = context
        self._batch = Batch(context.batch_size, width, with_tokens=False)

    def __call__(self, rows: Rows) -> Rows:
        """Rows [n, width] as [n, E], n at most the draft's batch."""
        # It knows no positions; llama.cpp wants those that come next, of some sequence.
        start = lib.llama_memory_seq_pos_max(lib.llama_get_memory(self._context.pointer), 0) + 1
        nothing = np.zeros(len(rows), dtype=np.int32)
        self._context.encode(self._batch.fill([Stretch(0, start, nothing, len(rows), rows)]))
        return self._context.hidden_rows(len(rows)).copy()


def open_eagle(weights: Weights, target: LlamaModel, options: ModelOptions) -> Head:
    """The draft over its own weights; the target notes from now on what it reads.

    Raises
    ------
    PairError
        It was made for another target, or llama.cpp does not hand out this target's layers.
    """
    layers = layers_read(weights.pointer)
    width = lib.llama_model_n_embd(target.weights.pointer)
    wanted = weights.metadata(f"{EAGLE}.target_hidden_size")
    n_layers = lib.llama_model_n_layer(target.weights.pointer)
    if wanted != str(width) or any(not 0 <= layer < n_layers for layer in layers):
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
