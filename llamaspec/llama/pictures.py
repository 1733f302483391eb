"""Pictures for a model: a projector file turns pixels into embeddings, which take the place of tokens.

In a sequence a picture is a run of ids above every vocabulary, made from a hash of its pixels and of the
projector: the same picture has the same ids, so caches need not know about pictures. The embeddings are
computed when they are first needed and kept up to a limit. tests/llama/test_pictures.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamaspec.errors import EvaluationError, ModelFileError, PromptError
from llamaspec.llama import runtime
from llamaspec.llama.runtime import Handle
from llamaspec.values import FIRST_OF_PICTURE, NO_TOKENS, PICTURE, Rows, TokenArray

Pixels = npt.NDArray[np.uint8]  # [height, width, 3] RGB
KEPT_BYTES = 256 << 20  # of pictures that no request holds, with their embeddings


def _load() -> Any:
    """Return the bindings of llama.cpp's library for pictures."""
    try:
        from llama_cpp import mtmd_cpp
    except (ImportError, OSError, RuntimeError) as error:  # AttributeError would be another version's fault
        raise ModelFileError(
            "this build of llama-cpp-python has no library for pictures (libmtmd); "
            "reinstall it without -DLLAVA_BUILD=OFF, or with `make run`"
        ) from error
    return mtmd_cpp


class Places(NamedTuple):
    """The positions of a picture's tokens on the axes of M-RoPE, by that of the first."""

    of_first: npt.NDArray[np.int32]  # [4, n] if the first one is 0
    steps: npt.NDArray[np.int32]  # [4, n] for each position before the picture

    def at(self, first: int) -> npt.NDArray[np.int32]:
        """Return the positions of a picture that begins at `first`: [4, n]."""
        return self.of_first + np.int32(first) * self.steps


@dataclass(eq=False)
class Picture:
    """A part of a prompt that is not text: as a rule, a picture is one part, but some models cut it up."""

    ids: TokenArray  # [n]
    n_positions: int  # in the model's own count
    places: Places | None  # its positions with M-RoPE; None = in order
    is_causal: bool  # otherwise all of it is evaluated at once
    n_bytes: int
    chunk: Handle = field(repr=False)  # llama.cpp's
    rows: Rows | None = field(default=None, repr=False)  # [n, E] once they are computed


class Projector:
    """An open projector file. It belongs to a loaded model, and lives as long as that.

    Raises ModelFileError if the file is missing, damaged, or made for another model.
    """

    def __init__(self, path: Path, model: Handle, n_threads: int) -> None:
        self.path, self._lib = path, _load()
        self.row_size = int(lib.llama_model_n_embd_inp(model.pointer))
        self._lib.mtmd_log_set(runtime.log.callback, ctypes.c_void_p(0))
        if not path.is_file():
            raise ModelFileError(f"{path} does not exist; give --mmproj a GGUF file")
        parameters = self._lib.mtmd_context_params_default()
        parameters.print_timings, parameters.warmup = False, False
        parameters.n_threads = n_threads
        with runtime.log.of_call() as said:
            pointer = self._lib.mtmd_init_from_file(str(path).encode(), model.pointer, parameters)
        if not pointer:
            raise ModelFileError(f"{path} is no projector for this model: {said.reason}")
        self._handle = Handle(pointer, self._lib.mtmd_free, model)
        self.sees = bool(self._lib.mtmd_support_vision(pointer))
        self.has_axes = bool(self._lib.mtmd_decode_use_mrope(pointer))  # M-RoPE
        digest = hashlib.blake2b()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        self._digest = digest.digest()
        self._lock = threading.Lock()
        self._known: weakref.WeakValueDictionary[int, Picture] = weakref.WeakValueDictionary()  # by first id
        self._kept: OrderedDict[int, Picture] = OrderedDict()

    def tokenize(
        self, parts: Sequence[bytes | Pixels], trusted: Sequence[bool], most: int
    ) -> tuple[TokenArray, tuple[Picture, ...]]:
        """Return the tokens of texts and pictures, without the beginning-of-text token, and the pictures.

        Each text comes with whether its control tokens are read as such. Keep the pictures until the
        sequence has ended. A picture that is evaluated at once has at most `most` tokens.
        """
        mtmd, needed = self._lib, list[Any]()
        entries = (ctypes.POINTER(mtmd.mtmd_input_part) * len(parts))()
        digests = []
        for i, part in enumerate(parts):
            entry = mtmd.mtmd_input_part()
            if isinstance(part, bytes):
                text = mtmd.mtmd_input_text(part, len(part), False, trusted[i])
                entry.text = ctypes.pointer(text)
                needed.append(text)
            else:
                digest = hashlib.blake2b(str(part.shape).encode() + part.tobytes(), key=self._digest)
                bitmap = self._bitmap(part, digest.hexdigest())
                entry.bitmap = bitmap.pointer
                needed.append(bitmap)
                digests.append(digest.hexdigest())
            needed.append(entry)
            entries[i] = ctypes.pointer(entry)
        chunks = Handle(mtmd.mtmd_input_chunks_init(), mtmd.mtmd_input_chunks_free)
        with runtime.log.of_call() as said:
            status = mtmd.mtmd_tokenize_from_parts(
                self._handle.pointer, chunks.pointer, entries, len(parts), False
            )
        if status:
            raise PromptError(f"the projector cannot take this picture: {said.reason}")
        return self._translated(chunks, Counter(digests), most)

    def _bitmap(self, pixels: Pixels, name: str) -> Handle:
        height, width, _ = pixels.shape
        data = np.ascontiguousarray(pixels)
        pointer = self._lib.mtmd_bitmap_init(
            width, height, data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        )
        bitmap = Handle(pointer, self._lib.mtmd_bitmap_free)
        self._lib.mtmd_bitmap_set_id(pointer, name.encode())
        return bitmap

    def _translated(
        self, chunks: Handle, n_uses: Counter[str], most: int
    ) -> tuple[TokenArray, tuple[Picture, ...]]:
        """Return the tokens of llama.cpp's chunks, with ids for those of pictures."""
        mtmd = self._lib
        found = [
            mtmd.mtmd_input_chunks_get(chunks.pointer, i)
            for i in range(mtmd.mtmd_input_chunks_size(chunks.pointer))
        ]
        names = [(mtmd.mtmd_input_chunk_get_id(chunk) or b"").decode() for chunk in found]
        n_all, n_seen = Counter(names), Counter[str]()
        tokens, pictures = list[TokenArray](), list[Picture]()
        for chunk, name in zip(found, names, strict=True):
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                n = ctypes.c_size_t()
                text = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
                tokens.append(np.array(text[: n.value], dtype=np.int32))
                continue
            place = n_seen[name] % max(1, n_all[name] // max(1, n_uses[name]))  # some models cut it up
            n_seen[name] += 1
            picture = self._picture(chunk, f"{name} {place}")
            if not picture.is_causal and len(picture.ids) > most:
                raise PromptError(
                    f"a picture of {len(picture.ids)} tokens does not fit an evaluation of {most}"
                )
            tokens.append(picture.ids)
            pictures.append(picture)
        return np.concatenate(tokens) if tokens else NO_TOKENS, tuple(pictures)

    def _picture(self, chunk: Any, name: str) -> Picture:
        mtmd, n = self._lib, int(self._lib.mtmd_input_chunk_get_n_tokens(chunk))
        places = self._places(chunk, n) if self.has_axes else None
        told = b"" if places is None else places.of_first.tobytes()
        noise = hashlib.shake_128(f"{name} {n} ".encode() + told).digest(4 * n)
        ids = (np.frombuffer(noise, dtype="<u4") % PICTURE + PICTURE).astype(np.int32)
        ids[0] += FIRST_OF_PICTURE - PICTURE
        with self._lock:
            known = self._known.get(int(ids[0]))
            if known is not None and np.array_equal(known.ids, ids):
                self._keep(known)
                return known
            n_positions = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
            is_causal = not mtmd.mtmd_decode_use_non_causal(self._handle.pointer, chunk)
            handle = Handle(mtmd.mtmd_input_chunk_copy(chunk), mtmd.mtmd_input_chunk_free)
            n_bytes = 2 * n * self.row_size * 4  # about: the pixels, and then the embeddings
            picture = Picture(ids, n_positions, places, is_causal, n_bytes, handle)
            self._known[int(ids[0])] = picture
            self._keep(picture)
        return picture

    def _places(self, chunk: Any, n: int) -> Places:
        image, get = (
            self._lib.mtmd_input_chunk_get_tokens_image(chunk),
            self._lib.mtmd_image_tokens_get_decoder_pos,
        )
        found = [[get(image, first, i) for i in range(n)] for first in (0, 1)]
        of_first, next_to_it = (
            np.array([[each.t, each.y, each.x, each.z] for each in places], dtype=np.int32).T
            for places in found
        )
        return Places(of_first, next_to_it - of_first)

    def _keep(self, picture: Picture) -> None:
        """Keep a picture for later requests; drop those that were used longest ago."""
        first = int(picture.ids[0])
        self._kept[first] = picture
        self._kept.move_to_end(first)
        n_bytes = sum(each.n_bytes for each in self._kept.values())
        while n_bytes > KEPT_BYTES and len(self._kept) > 1:
            n_bytes -= self._kept.popitem(last=False)[1].n_bytes

    def at(self, tokens: TokenArray, start: int) -> Picture:
        """Return the picture whose ids begin at `start`."""
        picture = self._known.get(int(tokens[start]))
        if picture is None or not np.array_equal(tokens[start : start + len(picture.ids)], picture.ids):
            raise EvaluationError("a picture of the prompt is not known any more; send it again")
        return picture

    def rows_of(self, picture: Picture) -> Rows:
        """Return the embeddings of a picture, computed at the first call; only for the compute thread."""
        if picture.rows is None:
            with runtime.log.of_call() as said:
                status = self._lib.mtmd_encode_chunk(self._handle.pointer, picture.chunk.pointer)
            if status:
                raise EvaluationError(f"the projector could not compute a picture: {said.reason}")
            output = self._lib.mtmd_get_output_embd(self._handle.pointer)
            shape = len(picture.ids), self.row_size
            rows = np.ctypeslib.as_array(ctypes.cast(output, ctypes.POINTER(ctypes.c_float)), shape).copy()
            if not np.isfinite(rows).all():
                raise EvaluationError(f"{self.path} gives embeddings that are not numbers; download it again")
            picture.rows = rows
        return picture.rows
