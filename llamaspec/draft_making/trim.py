"""Makes a draft model smaller by dropping tokens: rows of its embedding and output matrices.

A small draft model spends much of its time on the output matrix. The remaining rows are copied byte for byte,
so their logits do not change; the draft model samples from the tokens that both vocabularies have
(`drafters/common_vocabulary.py`). Like FR-Spec, Zhao et al., arXiv 2502.14856.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llamaspec.drafters.common_vocabulary import SAMPLE
from llamaspec.errors import LlamaspecError, ModelFileError, PromptError
from llamaspec.files import file_identity
from llamaspec.llama.gguf_file import check_gguf, read_gguf
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.quantize import COPY, rewrite, write_copy
from llamaspec.llama.weights import Weights
from llamaspec.plan import DRAFT_FOR
from llamaspec.values import TokenArray

if TYPE_CHECKING:
    from gguf import GGUFReader

KEEP = 32768  # default number of tokens
MODELS = ("gpt2", "gemma4", "llama")  # supported tokenizers: BPE, and SentencePiece with byte fallback
_NORMAL, _UNUSED, _BYTE = 1, 5, 6  # llama.cpp's types of tokens; the others are special
_RESERVED = re.compile(r"<unused\d+>")  # Gemma has 6,242 that occur in no text
_LETTERS = 0x144  # byte-level vocabularies write each byte as a character below this
_ROWS = re.compile(
    r"(per_layer_)?token_embd\.weight|output\.(weight|bias)"
    r"|blk\.\d+\.nextn\.(embed_tokens|shared_head_head)\.weight"
)
_TOKENIZER = "tokenizer.ggml."
_LISTS = ("tokens", "token_type", "scores")  # metadata with an entry for each token
_LEFT_OUT = ("tokenizer.huggingface.json", "tokenizer.ggml.added_tokens")
_CHUNK = 1 << 20  # bytes of text to tokenize at once

Counts = npt.NDArray[np.int64]  # [V] occurrences of each token in the text


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Sizes of the copy and of the original."""

    n_tokens: int
    n_tokens_before: int
    n_bytes: int
    n_bytes_before: int
    of_text: float  # share of the text that consists of kept tokens


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A vocabulary as a GGUF file stores it."""

    tokens: Sequence[str]  # [V]
    types: Sequence[int]  # [V]
    merges: Sequence[str]
    named: Sequence[int]  # tokens that the metadata names, such as bos and eos

    def kept(self, n: int, counts: Counts) -> TokenArray:
        """Return the tokens to keep, ascending: special tokens and single bytes, then the most frequent ones.

        Of equally frequent tokens, the lowest ids come first, because BPE learnt them first. A token is kept
        with the parts that it is merged from, so that any text can still be tokenized. LlamaspecError if `n`
        is out of range, as in `choose_from`.
        """
        always, useful = self.choose_from(n)
        ids = {text: token for token, text in enumerate(self.tokens)}
        parts: dict[int, list[int]] = {}
        for merge in reversed(self.merges):  # if several make the same token, the first one counts
            left, right = _parts(merge)
            if {left, right, left + right} <= ids.keys():
                parts[ids[left + right]] = [ids[left], ids[right]]
        kept = set(always)
        for token in np.argsort(-counts, kind="stable").tolist():
            wanted, stack = set[int](), [token] if token in useful else []
            while stack and len(kept) + len(wanted) <= n:
                each = stack.pop()
                if each not in kept and each not in wanted:
                    wanted.add(each)
                    stack += parts.get(each, ())
            if len(kept) + len(wanted) <= n:
                kept |= wanted
        return np.array(sorted(kept), dtype=np.int32)

    def choose_from(self, n: int) -> tuple[set[int], set[int]]:
        """Return the tokens that are always kept, and all that are used.

        LlamaspecError if `n` is less than the former, or not less than the latter.
        """
        always = {token for token in range(len(self.tokens)) if self._is_needed(token)}
        useful = always.union(filter(self._is_useful, range(len(self.tokens))))
        if not len(always) <= n < len(useful):
            raise LlamaspecError(
                f"cannot keep {n} tokens: {len(useful)} are used, {len(always)} of them special or single "
                f"bytes; choose from {len(always)} to {len(useful) - 1} with --keep"
            )
        return always, useful

    def merges_of(self, kept: TokenArray) -> list[str]:
        """Return the merges of kept tokens into a kept token; at least one, because llama.cpp needs it."""
        known = {self.tokens[token] for token in kept.tolist()}
        found = [merge for merge in self.merges if known.issuperset((*_parts(merge), "".join(_parts(merge))))]
        return found or list(self.merges[:1])

    def _is_useful(self, token: int) -> bool:
        return self.types[token] != _UNUSED and not _RESERVED.fullmatch(self.tokens[token])

    def _is_needed(self, token: int) -> bool:
        text, kind = self.tokens[token], self.types[token]
        is_byte = kind == _BYTE or (len(text) == 1 and (ord(text) < _LETTERS or text == "▁"))
        return is_byte or token in self.named or (kind != _NORMAL and self._is_useful(token))


def trim_draft(
    source: Path,
    output: Path,
    texts: Sequence[bytes] = (),
    keep: int = KEEP,
    file_type: str = COPY,
    target: Path | None = None,
) -> Trimmed:
    """Write a copy of a draft model with fewer tokens; `output` appears when it is complete.

    Keeps the most frequent tokens of the UTF-8 `texts`; without texts, those of a short sample and the lowest
    ids. With `target`, `--draft auto` finds the copy for this target. LlamaspecError if the draft model is
    damaged or cannot be trimmed, or if the copy cannot be written.
    """
    check_gguf(source)
    if read_gguf(source).number("split.count") > 1:
        raise ModelFileError(f"{source} is split into parts; join them with llama-gguf-split --merge")
    import gguf  # takes a third of a second

    try:
        reader = gguf.GGUFReader(source)
        tokenizer = _tokenizer(reader)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelFileError(
            f"{source} cannot be trimmed: {error}; download it again, or name another draft"
        ) from error
    tokenizer.choose_from(keep)  # fails before the texts are read
    counts = _count(source, texts or (SAMPLE.encode(),))
    kept = tokenizer.kept(keep, counts)
    entries = dict(_trimmed(reader, tokenizer, kept))
    if target is not None:
        entries[DRAFT_FOR] = file_identity(target)
    rows = {tensor.name: kept for tensor in reader.tensors if _ROWS.fullmatch(tensor.name)}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".llamaspec-draft-", dir=output.parent) as unfinished:
            copy = Path(unfinished) / "trimmed.gguf"
            rewrite(reader, copy, entries, rows)
            if file_type == COPY:
                copy.replace(output)
            else:
                write_copy(copy, output, file_type=file_type)
        sizes = output.stat().st_size, source.stat().st_size
    except OSError as error:
        raise LlamaspecError(
            f"cannot write into {output.parent}: {error.strerror or error}; name another file with --output"
        ) from error
    return Trimmed(len(kept), len(counts), *sizes, float(counts[kept].sum() / max(1, counts.sum())))


def _count(source: Path, texts: Sequence[bytes]) -> Counts:
    """Count the tokens of texts in a model's vocabulary."""
    weights = Weights(source, ModelOptions(gpu_layers=0, repack=False))  # only mapped
    try:
        counts = np.zeros(weights.vocabulary.size, dtype=np.int64)
        for chunk in _chunks(texts):
            tokens = weights.vocabulary.tokenize(chunk, add_special=False)
            counts += np.bincount(tokens, minlength=len(counts))
        return counts
    except PromptError as error:
        raise PromptError(f"cannot tokenize a text of --text: {error}") from error
    finally:
        weights.close()


def _chunks(texts: Sequence[bytes]) -> Iterator[bytes]:
    for text in texts:
        lines = io.BytesIO(text)
        while chunk := lines.readlines(_CHUNK):
            yield b"".join(chunk)


def _parts(merge: str) -> tuple[str, str]:
    """Split a merge into its two parts; the first may begin with a space."""
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    """Read the vocabulary; ValueError if the tokenizer is unsupported or sizes do not match."""
    found = {name: field.contents() for name, field in reader.fields.items() if name.startswith(_TOKENIZER)}
    model, tokens = found.get("tokenizer.ggml.model"), found.get("tokenizer.ggml.tokens", [])
    if model not in MODELS:
        raise ValueError(f"its tokenizer is {model}, not one of {', '.join(MODELS)}")
    types = found.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    rows = [tensor.data.shape[0] for tensor in reader.tensors if _ROWS.fullmatch(tensor.name)]
    if not rows or {len(types), *rows} != {len(tokens)}:
        raise ValueError(f"it has {len(tokens)} tokens, {len(types)} types, and matrices of {rows} rows")
    named = [value for name, value in found.items() if name.endswith("_token_id")]
    return Tokenizer(tokens, types, found.get("tokenizer.ggml.merges", []), named)


def _trimmed(reader: GGUFReader, tokenizer: Tokenizer, kept: TokenArray) -> Iterator[tuple[str, Any]]:
    """Yield the metadata to change, with new values; None = removed."""
    places = {token: i for i, token in enumerate(kept.tolist())}
    for name, entry in reader.fields.items():
        key = name.removeprefix(_TOKENIZER)
        if key in _LISTS:
            value = entry.contents()
            yield name, [value[token] for token in places]
        elif key == "merges":
            yield name, tokenizer.merges_of(kept)
        elif key.endswith(".vocab_size"):
            yield name, len(kept)
        elif key.endswith("_token_id"):
            yield name, places.get(entry.contents(), entry.contents())
        elif key.endswith("_token_ids") or key == "suppress_tokens":
            yield name, [places[token] for token in entry.contents() if token in places] or None
        elif name in _LEFT_OUT:
            yield name, None
