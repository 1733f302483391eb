"""A context for a draft in a file of its own that reads the target's hidden rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.llama.batch import Batch, Segment
from llamaspec.llama.context import Context
from llamaspec.llama.hidden_draft_file import HiddenDraftFile
from llamaspec.llama.hidden_rows import show_hidden_rows
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.runtime import AbortFlag
from llamaspec.llama.weights import Weights
from llamaspec.values import Rows

ENCODED = 64  # hidden rows that are encoded at once: llama.cpp makes room for as many rows of logits
_M_ROPE = (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)


class DraftContext(Context):
    """A context over a draft's weights; it uses the embedding and output of `target` if it has none.

    Raises MemoryFullError if the machine has no room for the KV cache.
    """

    def __init__(
        self,
        weights: Weights,
        options: ModelOptions,
        draft: HiddenDraftFile,
        target: Context,
        abort: AbortFlag,
        store: PrefixStore,
    ) -> None:
        options = replace(options, heads=False, hidden_layers=())
        row_size = 0 if draft.is_block else weights.hidden_size
        super().__init__(weights, options, other=target, abort=abort, store=store, row_size=row_size)
        n_axes = 4 if lib.llama_model_rope_type(weights.pointer) in _M_ROPE else 1
        size = len(draft.layers) * draft.hidden_size
        self._features = Batch(self.batch_size, size, has_tokens=False, n_axes=n_axes)
        self.scored_only = draft.kind != "dflash2"
        show_hidden_rows(self.pointer, scored_only=self.scored_only)
        lib.llama_set_causal_attn(self.pointer, draft.is_causal)

    def inject(self, segments: list[Segment]) -> None:
        """Compute keys and values from hidden rows alone, without logits. Errors as for `decode`."""
        self.compute(lib.llama_decode, self._features, segments)

    def encode(self, rows: Rows) -> Rows:
        """Return what the draft's encoder makes of hidden rows: [n, E]. Errors as for `decode`."""
        encoded = np.empty((len(rows), self.weights.hidden_size), dtype=np.float32)
        # The encoder uses no positions, but llama.cpp wants those that follow the ones of the sequence: none.
        empty = lib.llama_n_seq_max(self.pointer) - 1
        for start in range(0, len(rows), ENCODED):
            part = rows[start : start + ENCODED]
            tokens = np.zeros(len(part), dtype=np.int32)
            self.compute(lib.llama_encode, self._features, [Segment(empty, 0, tokens, len(part), part)])
            encoded[start : start + len(part)] = self.hidden_rows(len(part))
        return encoded
