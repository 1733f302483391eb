"""A copy of a draft with fewer tokens: only those rows of its embedding and its output that matter.

The output is a large part of what a small draft reads for every token. The rows that stay are bytes of the
file as they are, so their scores are the same bit for bit; the draft draws among the common tokens of both
vocabularies (`drafters/common_vocabulary.py`). As FR-Spec does, Zhao et al., arXiv 2502.14856.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llamaspec.drafters.common_vocabulary import SAMPLE
from llamaspec.errors import LlamaspecError, ModelFileError, PromptError
from llamaspec.files import replacing
from llamaspec.hub import DRAFT_FOR, identity
from llamaspec.llama.gguf_file import check_gguf, read_gguf
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.quantize import COPY, Copy, write_copy
from llamaspec.llama.weights import Weights
from llamaspec.values import TokenArray

if TYPE_CHECKING:
    from gguf import GGUFReader

KEEP = 32768  # tokens, unless told
MODELS = ("gpt2", "gemma4", "llama")  # tokenizers of merges, and of pieces with byte fallback
_NORMAL, _UNUSED, _BYTE = 1, 5, 6  # llama.cpp's types of tokens; the others are special
_RESERVED = re.compile(r"<unused\d+>")  # Gemma has 6,242, which no text holds
_LETTERS = 0x144  # byte-level vocabularies write a byte as a letter below this
_ROWS = re.compile(
    r"(per_layer_)?token_embd\.weight|output\.(weight|bias)"
    r"|blk\.\d+\.nextn\.(embed_tokens|shared_head_head)\.weight"
)
_LISTS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")
_MERGES = "tokenizer.ggml.merges"
_IDS = ("_token_id", "_token_ids", "suppress_tokens")  # ends of keys of token ids
_LEFT_OUT = ("tokenizer.huggingface.json", "tokenizer.ggml.added_tokens", "general.architecture")
_CHUNK = 1 << 20  # bytes of text that are tokenized together

Counts = npt.NDArray[np.int64]  # [V] how often each token occurs in the text


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What was written."""

    path: Path
    n_tokens: int  # of the vocabulary that is left
    n_tokens_before: int
    n_bytes: int
    n_bytes_before: int
    of_text: float  # share of the text's tokens that are left


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A vocabulary as a GGUF file holds it.

    Raises
    ------
    ModelFileError
        There is none, or its lists differ in length.
    """

    tokens: Sequence[str]  # [V]
    types: Sequence[int]  # [V]
    merges: Sequence[str]
    named: Sequence[int]  # bos, eos and others that the metadata names

    def kept(self, n: int, counts: Counts) -> TokenArray:
        """The tokens to keep, ascending: special ones and single bytes, then the most frequent.

        Of equally frequent ones those with the lowest ids, which BPE learnt first. With a token stay those
        that it is merged from, so that a text can still be tokenized.

        Raises
        ------
        LlamaspecError
            `n` is too small, or no fewer than there are.
        """
        always = [token for token in range(len(self.tokens)) if self._is_needed(token)]
        room = n - len(always)
        n_used = len({*always, *filter(self._is_word, range(len(self.tokens)))})
        if room < 0 or n >= n_used:
            raise LlamaspecError(
                f"cannot keep {n} tokens: {len(always)} are special or single bytes, and {n_used} are used; "
                f"choose from {len(always)} to {n_used - 1} with --keep"
            )
        is_kept = np.zeros(len(self.tokens), dtype=bool)
        is_kept[always] = True
        parts = self._parts()
        for token in np.argsort(-counts, kind="stable").tolist():
            if room == 0:
                break
            wanted, stack = set[int](), [token]
            while stack and len(wanted) <= room:
                each = stack.pop()
                if not is_kept[each] and each not in wanted:
                    wanted.add(each)
                    stack += parts.get(each, ())
            if len(wanted) <= room and (counts[token] or self._is_word(token)):
                is_kept[list(wanted)] = True
                room -= len(wanted)
        return np.flatnonzero(is_kept).astype(np.int32)

    def merges_of(self, kept: TokenArray) -> list[str]:
        """The merges whose parts and result are kept; llama.cpp wants one at least."""
        known = {self.tokens[token] for token in kept.tolist()}
        found = [merge for merge in self.merges if known.issuperset((*_split(merge), "".join(_split(merge))))]
        return found or list(self.merges[:1])

    def _is_word(self, token: int) -> bool:
        return self.types[token] != _UNUSED and not _RESERVED.fullmatch(self.tokens[token])

    def _is_needed(self, token: int) -> bool:
        text, kind = self.tokens[token], self.types[token]
        is_byte = kind == _BYTE or (len(text) == 1 and (ord(text) < _LETTERS or text == "▁"))
        return is_byte or token in self.named or (kind != _NORMAL and self._is_word(token))

    def _parts(self) -> dict[int, tuple[int, int]]:
        """What each token is merged from."""
        ids = {text: token for token, text in enumerate(self.tokens)}
        parts: dict[int, tuple[int, int]] = {}
        for merge in self.merges:
            left, right = _split(merge)
            if {left, right, left + right} <= ids.keys():
                parts.setdefault(ids[left + right], (ids[left], ids[right]))
        return parts


def trim_draft(
    source: Path,
    output: Path,
    texts: Sequence[bytes] = (),
    keep: int = KEEP,
    file_type: str = COPY,
    target: Path | None = None,
) -> Trimmed:
    """Write a copy of a draft with fewer tokens; it has its name only once it is complete.

    Parameters
    ----------
    source, output : Path
        GGUF files.
    texts : sequence of bytes
        UTF-8; their most frequent tokens are kept. Default: a short sample, and the lowest ids.
    keep : int
        Tokens that are left.
    file_type : str
        What to quantise the copy to; "copy" = the rows as they are.
    target : Path, optional
        Whose draft it is: `--draft auto` then knows it by its metadata.

    Raises
    ------
    LlamaspecError
        The draft is damaged or cannot be trimmed, or the copy cannot be written.
    """
    check_gguf(source)
    if read_gguf(source).numbers.get("split.count", 1) > 1:
        raise ModelFileError(f"{source} is one of several parts; join them with llama-gguf-split --merge")
    counts = _count(source, texts or (SAMPLE.encode(),))
    import gguf  # a third of a second, which few need

    try:
        draft = _Draft(gguf.GGUFReader(source))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelFileError(f"{source} cannot be trimmed: {error}; download or convert it again") from error
    kept = draft.tokenizer.kept(keep, counts)
    changes = {} if target is None else {DRAFT_FOR: identity(target)}
    folder = output.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if file_type == COPY:
            draft.write(output, kept, changes)
        else:
            with tempfile.TemporaryDirectory(prefix=".llamaspec-draft-", dir=folder) as unfinished:
                draft.write(Path(unfinished) / "trimmed.gguf", kept, changes)
                write_copy(Path(unfinished) / "trimmed.gguf", output, Copy(file_type))
        n_bytes, n_bytes_before = output.stat().st_size, source.stat().st_size
    except OSError as error:
        raise LlamaspecError(
            f"cannot write into {folder}: {error.strerror or error}; name another place with --output"
        ) from error
    share = float(counts[kept].sum() / max(1, counts.sum()))
    return Trimmed(output, len(kept), len(counts), n_bytes, n_bytes_before, share)


def _count(source: Path, texts: Sequence[bytes]) -> Counts:
    weights = Weights(source, ModelOptions(gpu_layers=0, repack=False))  # only mapped
    try:
        counts = np.zeros(weights.vocabulary.size, dtype=np.int64)
        for chunk in _chunks(texts):
            tokens = weights.vocabulary.tokenize(chunk, add_special=False)
            counts += np.bincount(tokens, minlength=len(counts))
        return counts
    except PromptError as error:
        raise PromptError(f"a text cannot be counted: {error}") from error
    finally:
        weights.close()


def _chunks(texts: Sequence[bytes]) -> Iterator[bytes]:
    for text in texts:
        lines = io.BytesIO(text)
        while chunk := lines.readlines(_CHUNK):
            yield b"".join(chunk)


def _split(merge: str) -> tuple[str, str]:
    """The two parts of a merge; the first may begin with a space."""
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


@dataclass
class _Draft:
    reader: GGUFReader
    tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        tokens, types, merges = (self._value(key) or [] for key in (*_LISTS[:2], _MERGES))
        n = len(tokens)
        named = [self._value(name) for name in self.reader.fields if name.endswith(_IDS[0])]
        self.tokenizer = Tokenizer(tokens, types or [_NORMAL] * n, merges, named)
        model = self._value("tokenizer.ggml.model")
        if model not in MODELS:
            raise ValueError(f"its tokenizer is {model}, not one of {', '.join(MODELS)}")
        rows = [tensor.data.shape[0] for tensor in self.reader.tensors if _ROWS.fullmatch(tensor.name)]
        if {n, len(self.tokenizer.types), *rows} != {n} or not rows:
            raise ValueError(f"it has {n} tokens, and matrices of {rows} rows")

    def write(self, path: Path, kept: TokenArray, changes: dict[str, str]) -> None:
        """Write the kept rows of the matrices of tokens, and all other tensors; one at a time."""
        import gguf

        with replacing(path) as file:
            writer = gguf.GGUFWriter(file.name, self._value("general.architecture"))
            for entry in self.reader.fields.values():
                value = self._trimmed(entry.name, entry.contents(), kept)
                if entry.name.startswith("GGUF.") or entry.name in (*_LEFT_OUT, *changes) or value == []:
                    continue
                if entry.name == "general.alignment":
                    writer.data_alignment = value
                kinds = entry.types
                part = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(entry.name, value, kinds[0], sub_type=part)
            for key, text in changes.items():
                writer.add_string(key, text)
            for tensor in self.reader.tensors:
                data = tensor.data
                n = len(kept) if _ROWS.fullmatch(tensor.name) else data.shape[0]
                n_bytes = data.nbytes // data.shape[0] * n
                writer.add_tensor_info(
                    tensor.name, (n, *data.shape[1:]), data.dtype, n_bytes, tensor.tensor_type
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in self.reader.tensors:
                rows = tensor.data[kept] if _ROWS.fullmatch(tensor.name) else tensor.data
                writer.write_tensor_data(rows)
            writer.close()

    def _value(self, key: str) -> Any:
        found = self.reader.fields.get(key)
        return None if found is None else found.contents()

    def _trimmed(self, key: str, value: Any, kept: TokenArray) -> Any:
        """An entry of the metadata for the kept tokens."""
        if key in _LISTS:
            return [value[token] for token in kept.tolist()]
        if key == _MERGES:
            return self.tokenizer.merges_of(kept)
        if key.endswith(".vocab_size"):
            return len(kept)
        if key.endswith(_IDS):
            places = {token: i for i, token in enumerate(kept.tolist())}
            if isinstance(value, list):
                return [places[token] for token in value if token in places]
            return places.get(value, value)
        return value
