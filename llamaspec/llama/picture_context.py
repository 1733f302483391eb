"""A context whose sequences may contain pictures. tests/llama/test_pictures.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.errors import ModelFileError
from llamaspec.llama import resources
from llamaspec.llama.batch import Batch, Segment
from llamaspec.llama.cells import MropeCells
from llamaspec.llama.context import Context
from llamaspec.llama.kv_cache import KVCache
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.pictures import Picture, Projector
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.runtime import AbortFlag
from llamaspec.llama.weights import Weights
from llamaspec.values import PICTURE, ForwardRequest, Logits

N_AXES = 4  # positions of a picture's token with M-RoPE


class _PictureBatch(Batch):
    """Embeddings instead of tokens, at positions in order or, with M-RoPE, at those of a picture."""

    def __init__(self, size: int, row_size: int, *, has_axes: bool) -> None:
        n_axes = N_AXES if has_axes else 1
        super().__init__(size, row_size, has_tokens=False, n_axes=n_axes)
        self.places: Any = None  # [4, n] of the next evaluation

    def fill(self, segments: Sequence[Segment]) -> lib.llama_batch:
        """Return the batch that evaluates some segments; valid until the next call."""
        batch = super().fill(segments)
        if self.places is not None:
            self._position[: self.places.size] = self.places.ravel()
        return batch


class PictureContext(Context):
    """A context of a model that has a projector. A picture is evaluated apart from text."""

    def __init__(
        self,
        weights: Weights,
        options: ModelOptions,
        projector: Projector,
        abort: AbortFlag,
        store: PrefixStore,
    ) -> None:
        self._projector = projector
        if projector.has_axes:
            self.kind_of_cells = MropeCells
        super().__init__(weights, options, abort=abort, store=store)
        self._pictures = _PictureBatch(self.batch_size, projector.row_size, has_axes=projector.has_axes)

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Evaluate prepared requests together; return a view of the logits of each: [n_scored, V]."""
        for number, request in batch:
            self._evaluate_pictures(number, request)
        return self._evaluate(batch, n_padding)

    def _evaluate_pictures(self, number: int, request: ForwardRequest) -> None:
        """Evaluate everything up to the end of the last picture that is not cached."""
        sequence = self.cache.running[number]
        new = np.flatnonzero(request.tokens[sequence.n :] >= PICTURE)
        while len(new):
            start = int(new[0]) + sequence.n
            while sequence.n < start:
                end = min(start, sequence.n + self.batch_size)
                self._evaluate([(number, request.prefill(end))], 0)
            picture = self._projector.at(request.tokens, start)
            self._evaluate_picture(number, picture)
            new = np.flatnonzero(request.tokens[sequence.n :] >= PICTURE)

    def _evaluate_picture(self, number: int, picture: Picture) -> None:
        assert isinstance(self.cache, KVCache)  # `LlamaModel` opens no projector for states
        sequence, cells = self.cache.running[number], self.cache.cells
        rows, n = self._projector.rows_of(picture), len(picture.ids)
        first = cells.position(sequence.seq_id, sequence.n)
        if not picture.is_causal:
            lib.llama_set_causal_attn(self.pointer, False)
        try:
            for start in range(0, n, self.batch_size):
                end = min(start + self.batch_size, n)
                if picture.places is not None:
                    self._pictures.places = picture.places.at(first)[:, start:end]
                segment = Segment(sequence.seq_id, first + start, picture.ids[start:end], 0, rows[start:end])
                self.compute(lib.llama_decode, self._pictures, [segment])
        finally:
            if not picture.is_causal:
                lib.llama_set_causal_attn(self.pointer, True)
        if isinstance(cells, MropeCells):
            cells.add_picture(sequence.seq_id, sequence.n, sequence.n + n, picture.n_positions)
        self.cache.commit([(number, picture.ids)])


def open_projector(weights: Weights, options: ModelOptions) -> Projector:
    """Open the projector of a model; ModelFileError if the two do not go together."""
    if weights.facts.keeps_states or options.heads or options.hidden_layers:
        what = "layers that keep states" if weights.facts.keeps_states else "drafts that read hidden rows"
        raise ModelFileError(f"pictures do not go with {what} yet; drop --mmproj {options.projector}")
    assert options.projector is not None
    return Projector(options.projector, weights.handle, options.threads or resources.default_threads())
