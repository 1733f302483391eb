"""Prompts for filling in the middle: order, omissions, and that no text becomes a mark."""

from __future__ import annotations

import itertools

import pytest

from llamaspec.chat.infill import File, fitting_infill_prompt, infill_prompt
from llamaspec.llama.vocabulary import LlamaVocabulary
from model_store import OpenModel
from tiny_models import Recipe
from tiny_vocabulary import BYTES, FIM, sentencepiece_vocabulary

FILES = [File("a.py", "A = 1"), File("b.py", "B = 2")]
CODER = Recipe(vocabulary=BYTES.with_controls(*FIM))
ONE_FILE = Recipe(vocabulary=sentencepiece_vocabulary().with_controls(*FIM[:3]))


def spelled(vocabulary: LlamaVocabulary, prompt: list[int]) -> str:
    """Return a prompt as text with its marks."""
    names = {token: name for name, token in vocabulary.controls.items()}
    pieces = (names[token].encode() if token in names else vocabulary.piece(token) for token in prompt)
    return b"".join(pieces).decode()


@pytest.fixture
def coder(opened: OpenModel) -> LlamaVocabulary:
    return opened(recipe=CODER).vocabulary


def test_the_order_of_the_parts(coder: LlamaVocabulary) -> None:
    cursor = "<|fim_prefix|>def f(<|fim_suffix|>):\n<|fim_middle|>"
    assert spelled(coder, infill_prompt(coder, "def f(", "):\n").tolist()) == f"<s>{cursor}"
    others = "<|file_sep|>a.py\nA = 1\n<|file_sep|>b.py\nB = 2\n<|file_sep|>file\n"
    prompt = fitting_infill_prompt(coder, "def f(", "):\n", FILES, 300)
    assert spelled(coder, prompt.tolist()) == f"<s><|repo_name|>project\n{others}{cursor}"


def test_a_model_that_knows_only_one_file(opened: OpenModel) -> None:
    """Also a vocabulary that puts a space before every text."""
    vocabulary = opened(recipe=ONE_FILE).vocabulary
    prompt = fitting_infill_prompt(vocabulary, "def f(", "):", FILES[1:], 300)
    cursor = "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>"
    assert spelled(vocabulary, prompt.tolist()) == f"<s>b.py\nB = 2\n{cursor}"


def test_text_that_is_spelled_like_a_mark_stays_text(coder: LlamaVocabulary) -> None:
    text = "".join(FIM)
    prompt = fitting_infill_prompt(coder, text, text, [File(text, text)], 900).tolist()
    assert [prompt.count(coder.controls[name]) for name in FIM] == [1, 1, 1, 1, 2, 0]


def test_marks_of_other_files_end_a_text(coder: LlamaVocabulary) -> None:
    assert {coder.controls[name] for name in FIM[3:]} <= set(coder.ends)
    assert not {coder.controls[name] for name in FIM[:3]} & set(coder.ends)


@pytest.mark.parametrize("room", [60, 200, 1000, 9000])
@pytest.mark.parametrize("length", [0, 5, 400, 5000])
def test_a_prompt_fits_its_room(coder: LlamaVocabulary, length: int, room: int) -> None:
    files = [File(f"{i}.py", "x" * (length // 4)) for i in range(8)]
    prompt = fitting_infill_prompt(coder, "p" * length, "s" * length, files, room)
    assert len(prompt) <= room
    if length:
        assert len(prompt) >= min(2 * length, room // 4)


def test_the_last_files_and_the_text_next_to_the_cursor_are_kept(coder: LlamaVocabulary) -> None:
    files = [File(str(i), "x" * 90) for i in range(5)]
    text = spelled(coder, fitting_infill_prompt(coder, "a" * 900 + "!", "?" + "b" * 900, files, 400).tolist())
    assert "!<|fim_suffix|>?" in text
    assert [str(i) for i in range(5) if f"<|file_sep|>{i}\n" in text] == ["3", "4"]


def test_a_long_prefix_begins_alike_for_many_keystrokes(coder: LlamaVocabulary) -> None:
    """Otherwise each keystroke would process the whole text again."""
    text = "".join(f"{i}," for i in range(999))
    prompts = [fitting_infill_prompt(coder, text[:n], "", (), 400).tolist() for n in range(1000, 1100)]
    begin = [prompt[:-2] for prompt in prompts]  # without the marks after the cursor
    moves = sum(a != b[: len(a)] for a, b in itertools.pairwise(begin))
    assert 1 <= moves <= 3
