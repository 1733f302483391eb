"""Bytes in the tokens of a vocabulary, and a text that grows, shrinks and changes: used against fresh."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import tokens
from foreign import FakeVocabulary, joined
from llamaspec.drafters.spelling import LONGEST, SHORTEST, Spelling, TextMirror, complete
from llamaspec.values import NO_TOKENS, TokenArray

BYTES = [bytes([i]) for i in range(256)]
SAID = [b" the", b"the", b" a", b"  ", b" end", "é".encode(), "👩".encode(), b"\n\n"]
TARGET = FakeVocabulary(
    [b"<s>", b"<x>", b"<only>", *BYTES, *SAID], {0: b"<s>", 1: b"<x>", 2: b"<only>"}, bos=0
)
DRAFT = FakeVocabulary(
    [*BYTES, b" then", b"he", b"nd", b" t", "日".encode(), b"[x]", b"[bos]"],
    {261: b"<x>", 262: b"[bos]"}, bos=262, adds_bos=True, adds_space=True,
)  # fmt: skip


def mirror(target: FakeVocabulary = TARGET, draft: FakeVocabulary = DRAFT) -> TextMirror:
    specials = {0: tokens(262), 1: tokens(261)} if target is TARGET else {}
    return TextMirror(Spelling(target), Spelling(draft), specials, tokens(262))


@pytest.mark.parametrize(
    "text", [b"the end", b" the", b"\xff\xfethe\xe2\x82", "日本 👩‍👩‍👧".encode(), b"\x80", b"", b"\n\nthe"]
)
def test_any_bytes_in_the_middle_of_a_text(text: bytes) -> None:
    for vocabulary in (TARGET, DRAFT):
        spelling = Spelling(vocabulary)
        assert spelling.text(spelling.tokens(text)) == text


def test_a_space_before_a_text_is_put_at_its_start_only() -> None:
    spelling = Spelling(DRAFT)
    assert (spelling.adds_space, Spelling(TARGET).adds_space) == (True, False)
    assert spelling.text(spelling.tokens(b"the", at_start=True)) == b" the"
    assert spelling.text(spelling.tokens(b"the")) == b"the"


def test_bytes_without_tokens_are_left_out() -> None:
    spelling = Spelling(FakeVocabulary([b"a", b"b"]))
    assert spelling.text(spelling.tokens(b"a\xffb\xe2\x82")) == b"ab"


@pytest.mark.parametrize(
    "text", [b"abc", "é".encode(), "日本".encode(), "a👩".encode(), b"\x80\x80\x80\x80", b""]
)
def test_a_whole_text_is_complete(text: bytes) -> None:
    assert complete(text) == text


@pytest.mark.parametrize("character", ["é", "日", "👩"])
def test_an_unfinished_character_is_cut_off(character: str) -> None:
    whole = character.encode()
    for n in range(1, len(whole)):
        assert complete(b"ab" + whole[:n]) == b"ab"


def test_special_tokens_and_the_start_of_a_text() -> None:
    read = mirror().read
    assert read(tokens(0, 3 + ord("a"))).tolist() == [262, 32, 97]  # a text begins: with a space
    assert read(tokens(3 + ord("a"))).tolist() == [262, 32, 97]
    assert read(tokens(0, 1, 3 + ord("a"))).tolist() == [262, 261, 32, 97]
    spelled = read(tokens(0, 3 + ord("a"), 2))  # what the draft does not have is text
    assert joined(Spelling(DRAFT), spelled) == b"[bos] a<only>"


def test_the_space_of_the_target_is_none_of_the_text() -> None:
    read = mirror(DRAFT, TARGET).read
    spelled = read(Spelling(DRAFT).tokens(b"the", at_start=True))
    assert joined(Spelling(TARGET), spelled[1:]) == b"the"


def texts() -> st.SearchStrategy[list[int]]:
    """Tokens of the target: text, special tokens, odd bytes; with stretches that are repeated."""
    part = st.lists(st.integers(0, TARGET.size - 1), max_size=12)
    words = st.lists(st.sampled_from(range(259, TARGET.size)), max_size=40)
    long = st.builds(lambda some, n: some * n, words, st.integers(1, 12))
    return st.builds(lambda a, b, c, d: [*a, *b, *c, *d], part, long, part, long)


@settings(max_examples=40)
@given(st.lists(texts(), min_size=1, max_size=3), st.data())
def test_used_is_fresh(some: list[list[int]], data: st.DataObject) -> None:
    """Texts in any order, cut anywhere, one the beginning of another."""
    used = mirror()
    for _ in range(8):
        text = data.draw(st.sampled_from(some))
        n = data.draw(st.integers(0, len(text)))
        context = np.array(text[:n], dtype=np.int32)
        assert used.read(context).tolist() == mirror().read(context).tolist()


def test_bit_by_bit_is_all_at_once() -> None:
    words, run = b"the end of a beginning, then " * 12, b"x" * (LONGEST + LONGEST // 2)
    text = Spelling(TARGET).tokens(words + run + "日本👩".encode() * 150)
    used = mirror()
    for n in range(0, len(text), 31):
        used.read(text[:n])
    said = used.read(text[:-1])
    assert said.tolist() == mirror().read(text[:-1]).tolist()
    assert joined(Spelling(DRAFT), said) == b"[bos] " + Spelling(TARGET).text(text[:-1])


def cuts(text: bytes) -> list[int]:
    """Before the first word 64 bytes behind a cut, or else between characters 1024 bytes behind it."""
    found, begin = list[int](), 0
    while True:
        words = [
            i for i in range(begin + 64, min(len(text), begin + 1025) - 1)
            if text[i : i + 1] == b" " and not text[i - 1 : i].isspace() and text[i + 1 : i + 2].isalpha()
        ]  # fmt: skip
        if not words and len(text) <= begin + 1024:
            return found
        begin = words[0] if words else len(text[: begin + 1024].decode("utf-8", "ignore").encode())
        found.append(begin)


@pytest.mark.parametrize(
    "text",
    [
        b"the end of a beginning " * 20,
        b"x" * 63 + b" a" + b"y" * 62 + b" b c 1",
        b"x" * 64 + b"  ab 1 c",
        b"x" * 1022 + b" a" + b"y" * 500,
        b"x" * 1023 + b" a" + b"y" * 500,
        b"x" * 1024 + b" a" + b"y" * 500,
        b"xx" + "日".encode() * 900 + " é".encode() + b" ab",
        b"x" + "👩".encode() * 700,
        b"x" * 1024,
        b"x" * 1025,
    ],
)
def test_where_a_text_is_cut(text: bytes) -> None:
    used = mirror()
    used.read(np.array([3 + byte for byte in text], np.int32))
    assert [chunk.end for chunk in used._chunks] == cuts(text)


def test_only_the_tail_is_tokenized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Spelling(TARGET).tokens(b"the end of a beginning " * 400)
    used, sizes = mirror(), list[int]()
    used.read(text)
    tokenize = FakeVocabulary.tokenize

    def noted(self: FakeVocabulary, part: bytes, *, add_special: bool = True) -> TokenArray:
        sizes.append(len(part))
        return tokenize(self, part, add_special=add_special)

    monkeypatch.setattr(FakeVocabulary, "tokenize", noted)
    for n in range(len(text) - 20, len(text)):
        sizes.clear()
        used.read(text[:n])
        assert sum(sizes) < 6 * SHORTEST


def test_nothing_is_a_text() -> None:
    assert mirror().read(NO_TOKENS).tolist() == [262]
