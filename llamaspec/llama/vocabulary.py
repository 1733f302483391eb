"""The vocabulary of a model: converts text to tokens and back, and compares two vocabularies."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llama_cpp import llama_cpp as lib

from llamaspec.errors import ClosedError, PairError, PromptError
from llamaspec.llama.gguf_file import GgufFile
from llamaspec.llama.runtime import Handle
from llamaspec.values import TokenArray

_CONTROL = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
# Many tokenizers of llama.cpp split a text into words with std::regex, which recurses over the characters of
# a word: 320 bytes of stack for each, so that a word of 26,000 would end the process.
SHORT = 1000  # bytes of a text that any stack suffices for
LONGEST = 512 << 10  # bytes of a text that the large stack suffices for, even as one word
_BETWEEN_LINES = re.compile(rb"[!-~]\n(?=[!-~])")
_ONE_AT_A_TIME = threading.Lock()  # long words of many requests would take as many stacks
MAX_SIZE_DIFFERENCE = 128  # unused tokens at the end of a vocabulary; llama.cpp allows as many


class FimTokens(NamedTuple):
    """The control tokens of fill-in-the-middle."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None  # None if the model supports only one file, as for `file`
    file: int | None


class LlamaVocabulary:
    """The vocabulary of a loaded model, which it keeps alive until it is closed.

    `spellings` are the texts of all tokens as `read_spellings` returns them.
    """

    def __init__(self, model: Handle, spellings: bytes) -> None:
        self.spellings = spellings
        self._model: Handle | None = model
        self._opened = lib.llama_model_get_vocab(model.pointer)
        self.size: int = lib.llama_vocab_n_tokens(self._vocab)
        self.bos: int = lib.llama_vocab_bos(self._vocab)  # -1 if the model has none
        self.eos: int = lib.llama_vocab_eos(self._vocab)
        self._is_bpe = lib.llama_vocab_type(self._vocab) == lib.LLAMA_VOCAB_TYPE_BPE
        self.sep: int = lib.llama_vocab_sep(self._vocab)  # -1 if the model has none, as the others
        self.adds_bos: bool = lib.llama_vocab_get_add_bos(self._vocab)
        self.adds_eos: bool = lib.llama_vocab_get_add_eos(self._vocab)
        self.adds_sep: bool = lib.llama_vocab_get_add_sep(self._vocab)
        self._pieces: dict[int, bytes] = {}  # not lru_cache: a reference cycle would keep the model alive
        self._ends: dict[int, bool] = {}

    @property
    def _vocab(self) -> Any:
        """The llama_vocab."""
        if self._model is None:
            raise ClosedError("the model is closed")
        return self._opened

    @functools.cached_property
    def controls(self) -> dict[str, int]:
        """The control tokens by their spelling, which `parse_special` recognizes."""
        vocab, size = self._vocab, self.size
        tokens = (token for token in range(size) if lib.llama_vocab_get_attr(vocab, token) & _CONTROL)
        return {self.text(token).decode("utf-8", errors="replace"): token for token in tokens}

    @functools.cached_property
    def specials(self) -> dict[int, bytes]:
        """The spellings of tokens that are not text: control tokens, and marks such as <tool_call>."""
        vocab, spelled = self._vocab, dict[int, bytes]()
        for token in range(self.size):
            kind = lib.llama_vocab_get_attr(vocab, token)
            if kind & (_CONTROL | lib.LLAMA_TOKEN_ATTR_USER_DEFINED):
                text = self.text(token)
                if kind & _CONTROL or (text.startswith(b"<") and text.endswith(b">")):
                    spelled[token] = text
        return spelled

    @functools.cached_property
    def fim(self) -> FimTokens | None:
        """The tokens of fill-in-the-middle; None if the model was not trained for it."""
        names = ("pre", "suf", "mid", "rep", "sep")
        found = (int(getattr(lib, f"llama_vocab_fim_{name}")(self._vocab)) for name in names)
        prefix, suffix, middle, repository, file = (None if token < 0 else token for token in found)
        if prefix is None or suffix is None or middle is None:
            return None
        return FimTokens(prefix, suffix, middle, repository, file)

    def tokenize(self, text: bytes, *, add_special: bool = True, parse_special: bool = False) -> TokenArray:
        """Return the token ids of UTF-8 text: int32 [n]. PromptError if it is not UTF-8.

        `add_special` adds the special tokens that the model wants at the start; some vocabularies always add
        a space. `parse_special` turns text that is spelled like a control token into that token. Use it only
        for trusted text: text of users or files could forge the turns of a conversation.
        """
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PromptError(
                f"the prompt is not UTF-8: byte {error.start} is 0x{text[error.start]:02x}; convert it first"
            ) from error
        if len(text) <= SHORT:
            return self._tokenized(text, add_special, parse_special)
        from llamaspec.large_stack import with_large_stack

        found: list[TokenArray] = []
        for part in parts_of(text) if self._is_bpe else [text]:
            work = partial(self._tokenized, part, add_special and not found, parse_special)
            with _ONE_AT_A_TIME:
                found.append(with_large_stack(work))
        return np.concatenate(found)

    def _tokenized(self, text: bytes, add_special: bool, parse_special: bool) -> TokenArray:
        """Return the token ids of a text that the stack of this thread suffices for."""
        tokens = np.empty(len(text) + 8, dtype=np.int32)
        n = lib.llama_tokenize(
            self._vocab,
            text,
            len(text),
            tokens.ctypes.data_as(lib.llama_token_p),
            len(tokens),
            add_special,
            parse_special,
        )
        if n < 0:
            raise PromptError(f"the tokenizer made more tokens than bytes of a prompt of {len(text)} bytes")
        return tokens[:n].copy()

    def tokenize_inside(self, text: str, *, parse_special: bool = False) -> TokenArray:
        """Return the token ids of text that follows other text, without SentencePiece's leading space."""
        tokens = self.tokenize(text.encode(), add_special=False, parse_special=parse_special)
        has_space = len(tokens) > 0 and self.piece(int(tokens[0])) == b" " and not text.startswith(" ")
        return tokens[1:] if has_space else tokens

    def begun(self, tokens: TokenArray) -> TokenArray:
        """Return the tokens with BOS before them, if the model wants it and they do not begin with it."""
        if not self.adds_bos or self.bos < 0 or tokens[:1].tolist() == [self.bos]:
            return tokens
        return np.concatenate([np.array([self.bos], dtype=np.int32), tokens])

    def text(self, token: int) -> bytes:
        """Return the spelling of a token in the vocabulary; `piece` returns the bytes that it stands for."""
        return bytes(lib.llama_vocab_get_text(self._vocab, token) or b"")

    def close(self) -> None:
        """Release the model, which may then be freed; later calls raise ClosedError."""
        self._model = None
        self._pieces.clear()
        self._ends.clear()

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text; none for control tokens."""
        if token not in self._pieces:
            buffer = ctypes.create_string_buffer(64)
            n = lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
            if n < 0:
                buffer = ctypes.create_string_buffer(-n)
                n = lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
            self._pieces[token] = buffer.raw[:n]
        return self._pieces[token]

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a completion, ascending."""
        return tuple(token for token in range(self.size) if self.is_end(token))

    def is_end(self, token: int) -> bool:
        """Whether a token ends a completion."""
        if token not in self._ends:
            self._ends[token] = bool(lib.llama_vocab_is_eog(self._vocab, token))
        return self._ends[token]


def parts_of(text: bytes) -> Iterator[bytes]:
    """Split UTF-8 text into parts of at most LONGEST bytes, between lines.

    Between two lines that are not empty, every tokenizer begins another word, so the tokens stay the same.
    Only a longer line is split elsewhere.
    """
    start = 0
    while len(text) - start > LONGEST:
        end = start + LONGEST
        while text[end] & 0xC0 == 0x80:  # within a character
            end -= 1
        for found in _BETWEEN_LINES.finditer(text, start, end):
            end = found.end()
        yield text[start:end]
        start = end
    yield text[start:]


def read_spellings(path: Path, found: GgufFile) -> bytes:
    """Return the strings of the vocabulary with their lengths, as they are in the file; may raise OSError.

    If those of one file are the beginning of another's, its tokens are the first tokens of the other.
    """
    start, end = found.tokens_at
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def check_pair(target: LlamaVocabulary, draft: LlamaVocabulary) -> None:
    """Raise PairError if a token id has different meanings; the message gives the first such id."""
    found = difference(target, draft)
    if found is not None:
        message = f"target and draft have different vocabularies: {found}"
        raise PairError(f"{message}; choose a draft of the same model family")


def difference(target: LlamaVocabulary, draft: LlamaVocabulary) -> str | None:
    """Describe the first difference of two vocabularies; None if there is none."""
    if target is draft:
        return None
    fewer, more = sorted((target.spellings, draft.spellings), key=len)
    # Only if these bytes differ are the tokens asked for one by one, which takes .2 s for 150,000.
    for token in () if fewer and more.startswith(fewer) else range(min(target.size, draft.size)):
        if target.text(token) != draft.text(token):
            shown = _shown(target, token), _shown(draft, token)
            return f"token {token} is {shown[0]} in the target and {shown[1]} in the draft"
    if abs(target.size - draft.size) <= MAX_SIZE_DIFFERENCE:
        return None
    shorter, longer = sorted((target, draft), key=lambda vocabulary: vocabulary.size)
    longer_name = "target" if longer is target else "draft"
    return (
        f"{target.size} and {draft.size} tokens; token {shorter.size} is "
        f"{_shown(longer, shorter.size)} in the {longer_name} only"
    )


def _shown(vocabulary: LlamaVocabulary, token: int) -> str:
    return repr(vocabulary.text(token).decode("utf-8", errors="replace"))
