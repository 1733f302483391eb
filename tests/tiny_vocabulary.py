"""Tiny, real tokenizers: they encode every byte string, and decode it to the same bytes.

Two families as llama.cpp knows them: byte-level BPE (``gpt2``) and SentencePiece with byte fallback
(``llama``). Most characters beyond ASCII take several tokens, so a UTF-8 sequence is split between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's token types

MERGES = (
    "Ġ t", "Ġ a", "h e", "i n", "r e", "Ġt he", "o n", "e r", "n d", "Ġa nd", "a t", "e s", "o r", "i s",
    "Ġ f", "Ġ =", "Ġ (", "Ġ Ġ", "ĠĠ ĠĠ", "Ċ Ċ", "d e", "s e", "Ġ self", "l f", "se lf", "r o", "en t", "e n",
    "Ã ©", "in g",
)  # fmt: skip
PIECES = ("▁", "▁the", "the", "▁a", "in", "re", "on", "▁and", "and", "er", "▁t", "he", "th", "an", "nd", "é")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as a GGUF file holds it. Token 0 begins a text unless `bos` says otherwise."""

    model: str  # "gpt2" or "llama"
    tokens: tuple[str, ...]  # V spellings, in the tokenizer's own alphabet
    types: tuple[int, ...]  # V token types
    merges: tuple[str, ...] = ()  # byte-level only
    scores: tuple[float, ...] = ()  # SentencePiece only: V of them
    bos: int = 0
    eos: int = 1
    adds_bos: bool = True
    pre: str = "gpt-2"  # how byte-level BPE splits a text into words

    def __len__(self) -> int:
        return len(self.tokens)

    def renamed(self, token: int, spelling: str) -> Vocabulary:
        """The same vocabulary with one token spelt differently."""
        return replace(self, tokens=(*self.tokens[:token], spelling, *self.tokens[token + 1 :]))

    def reordered(self, order: Sequence[int]) -> Vocabulary:
        """The same vocabulary with other numbers: token i is now what token order[i] was."""
        places = {token: i for i, token in enumerate(order)}
        return replace(
            self,
            tokens=tuple(self.tokens[token] for token in order),
            types=tuple(self.types[token] for token in order),
            scores=tuple(self.scores[token] for token in order) if self.scores else (),
            bos=places[self.bos],
            eos=places[self.eos],
        )

    def longer(self, n: int) -> Vocabulary:
        """The same vocabulary with `n` unused tokens behind it."""
        return replace(
            self,
            tokens=(*self.tokens, *(f"<extra_{i}>" for i in range(n))),
            types=(*self.types, *[UNUSED] * n),
            scores=(*self.scores, *[-1e3] * n) if self.scores else (),
        )

    def with_controls(self, *names: str) -> Vocabulary:
        """The same vocabulary with control tokens behind it."""
        tokens, types = (*self.tokens, *names), (*self.types, *[CONTROL] * len(names))
        return replace(
            self,
            tokens=tokens,
            types=types,
            scores=(*self.scores, *[0.0] * len(names)) if self.scores else (),
        )

    def marked(self, *marks: str) -> Vocabulary:
        """The same vocabulary with user-defined tokens behind it, as Qwen's files have for <tool_call>."""
        types = (*self.types, *[USER_DEFINED] * len(marks))
        return replace(self, tokens=(*self.tokens, *marks), types=types)


def byte_letters() -> Iterator[str]:
    """The letter by which byte-level BPE writes each byte, in the order of the bytes 0 to 255."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(0x100 + i) for i in range(256))
    for byte in range(256):
        yield chr(byte) if byte in plain else next(others)


def byte_vocabulary() -> Vocabulary:
    """Byte-level BPE with 288 tokens: 2 controls, 256 bytes, 30 merges."""
    # A merge joins spellings that exist before it, whatever the order of the list above.
    merged = tuple(merge.replace(" ", "") for merge in MERGES)
    tokens = ("<s>", "</s>", *byte_letters(), *merged)
    types = (CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 2))
    return Vocabulary("gpt2", tokens, types, merges=MERGES)


def sentencepiece_vocabulary() -> Vocabulary:
    """SentencePiece with byte fallback: 3 controls, 256 bytes, printable ASCII, a few pieces.

    llama.cpp puts a space before a text that such a vocabulary tokenizes.
    """
    letters = tuple(chr(i) for i in range(0x21, 0x7F))
    pieces = (*letters, *PIECES)
    tokens = ("<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces)
    types = (UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces))
    scores = (0.0,) * 259 + tuple(float(len(p)) - 50 for p in pieces)
    return Vocabulary("llama", tokens, types, scores=scores, bos=1, eos=2)


WORD_PIECE_MARKS = {"padding": 0, "unknown": 1, "seperator": 3, "mask": 4}  # by names in metadata (sic)


def word_piece_vocabulary() -> Vocabulary:
    """BERT's WordPiece: 5 controls, ASCII and a few pieces, at the start of a word and inside it."""
    letters = [chr(i) for i in range(0x21, 0x7F) if not chr(i).isupper()]
    pieces = (*letters, "the", "in", "re", "on", "and", "er", "th", "nd", "ing")
    tokens = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁{each}" for each in pieces), *pieces)
    types = (*[CONTROL] * 5, *[NORMAL] * (len(tokens) - 5))
    return Vocabulary("bert", tokens, types, bos=2, eos=3)


WORD_PIECE = word_piece_vocabulary()
BYTES = byte_vocabulary()
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")
