"""Text to tokens and back with real tokenizers of both families."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamaspec import LlamaModel, ModelOptions, PromptError
from llamaspec.llama.vocabulary import LlamaVocabulary
from model_store import ModelStore, OpenModel
from tiny_models import Recipe
from tiny_vocabulary import BYTES, sentencepiece_vocabulary

PIECES = sentencepiece_vocabulary()
TEXTS = [
    b"def f(self):\n    return the end\n",
    "naïve café – “quoted” €".encode(),
    "日本語のテキスト".encode(),
    "👩‍👩‍👧 family".encode(),
    b"\ttabs\r\nand  spaces  ",
    b"nul\x00byte",
    b"\n",
    b" ",
]


@pytest.fixture(scope="module")
def byte_level(store: ModelStore) -> Iterator[LlamaVocabulary]:
    with LlamaModel(store.path(), ModelOptions(threads=1)) as model:
        yield model.vocabulary


@pytest.fixture(scope="module")
def pieces(store: ModelStore) -> Iterator[LlamaVocabulary]:
    with LlamaModel(store.path("llama", Recipe(vocabulary=PIECES)), ModelOptions(threads=1)) as model:
        yield model.vocabulary


def joined(vocabulary: LlamaVocabulary, tokens: list[int]) -> bytes:
    return b"".join(vocabulary.piece(token) for token in tokens)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_pieces(pieces: LlamaVocabulary, text: bytes) -> None:
    """Such a vocabulary adds a space before the text."""
    assert joined(pieces, pieces.tokenize(text).tolist()) == b" " + text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(st.text(max_size=40).filter(lambda text: "<" not in text))
def test_round_trip_of_any_text(byte_level: LlamaVocabulary, text: str) -> None:
    assert joined(byte_level, byte_level.tokenize(text.encode()).tolist()) == text.encode()


def test_merges_are_used(byte_level: LlamaVocabulary) -> None:
    pieces = [byte_level.piece(token) for token in byte_level.tokenize(b"in the self").tolist()]
    assert pieces == [b"", b"in", b" the", b" self"]


def test_a_character_may_be_split_over_tokens(byte_level: LlamaVocabulary) -> None:
    pieces = [byte_level.piece(token) for token in byte_level.tokenize("€é".encode()).tolist()]
    assert pieces == [b"", b"\xe2", b"\x82", b"\xac", "é".encode()]


def test_text_longer_than_a_buffer(byte_level: LlamaVocabulary) -> None:
    text = b"x" * 100_000
    assert joined(byte_level, byte_level.tokenize(text).tolist()) == text


def test_a_piece_longer_than_the_first_buffer(opened: OpenModel) -> None:
    long = "a" * 300
    model = opened("llama", Recipe(vocabulary=BYTES.renamed(287, long)))
    assert model.vocabulary.piece(287) == long.encode()


def test_empty_text(byte_level: LlamaVocabulary) -> None:
    assert byte_level.tokenize(b"").tolist() == [BYTES.bos]


@pytest.mark.parametrize(
    ("text", "position", "byte"),
    [
        ("caf\xe9".encode("latin-1"), 3, "0xe9"),
        (b"\xff\xfe", 0, "0xff"),
        ("cut €".encode()[:-1], 4, "0xe2"),
        (b"surrogate \xed\xa0\x80", 10, "0xed"),
        (b"overlong \xc0\xaf", 9, "0xc0"),
    ],
)
def test_text_that_is_not_utf8(byte_level: LlamaVocabulary, text: bytes, position: int, byte: str) -> None:
    with pytest.raises(PromptError, match=f"byte {position} is {byte}; convert"):
        byte_level.tokenize(text)


def test_special_tokens(byte_level: LlamaVocabulary) -> None:
    """Recognized on request, as chat templates need, and without bytes in the output."""
    assert byte_level.tokenize(b"a</s>b", parse_special=True).tolist().count(BYTES.eos) == 1
    plain = byte_level.tokenize(b"a</s>b").tolist()
    assert BYTES.eos not in plain
    assert joined(byte_level, plain) == b"a</s>b"
    assert byte_level.controls == {"<s>": BYTES.bos, "</s>": BYTES.eos}
    assert byte_level.piece(BYTES.eos) == b""
    assert byte_level.piece(BYTES.bos) == b""
    assert byte_level.text(BYTES.eos) == b"</s>"
    assert (byte_level.bos, byte_level.eos, byte_level.size) == (BYTES.bos, BYTES.eos, len(BYTES))


def test_no_bos_token_if_the_model_wants_none(opened: OpenModel) -> None:
    model = opened("llama", Recipe(vocabulary=replace(BYTES, adds_bos=False)))
    assert joined(model.vocabulary, model.vocabulary.tokenize(b"x").tolist()) == b"x"
    assert len(model.vocabulary.tokenize(b"x")) == 1


def test_tokens_that_end_a_completion(byte_level: LlamaVocabulary, pieces: LlamaVocabulary) -> None:
    assert [token for token in range(byte_level.size) if byte_level.is_end(token)] == [BYTES.eos]
    assert [token for token in range(pieces.size) if pieces.is_end(token)] == [PIECES.eos]
