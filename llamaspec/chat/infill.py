"""The prompt for filling in the middle of a file: the text around the cursor, and other files.

Each text is tokenized separately between the model's own marks, so it cannot spell a control token. A long
prefix is cut in large steps, so that the prompts of successive keystrokes begin alike and the KV cache holds
most of each. tests/chat/test_infill.py.

References: Qwen2.5-Coder (arXiv 2409.12186) for the order of the parts, with one file and with several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from llamaspec.errors import PromptError
from llamaspec.llama.vocabulary import FimTokens, LlamaVocabulary
from llamaspec.values import TokenArray

AROUND = 2048  # maximum number of tokens around the cursor
REPOSITORY, THIS_FILE = "project", "file"  # names in the prompt; clients send none
N_MARKS = 16  # maximum number of tokens of the marks and of these names
LONGEST = 64  # characters of a token; longer ones are very rare

Text = TypeVar("Text", str, TokenArray)


class File(NamedTuple):
    """Another file, to which the code may refer."""

    name: str
    text: str


def infill_prompt(vocabulary: LlamaVocabulary, prefix: str, suffix: str) -> TokenArray:
    """Return the prompt for the text between two others: int32 [n].

    Raises
    ------
    PromptError
        The model has no tokens for filling in.
    """
    marks = _marks(vocabulary)
    return _joined(vocabulary, marks, (), *(vocabulary.tokenize_inside(text) for text in (prefix, suffix)))


def fitting_infill_prompt(
    vocabulary: LlamaVocabulary, prefix: str, suffix: str, files: Sequence[File], room: int
) -> TokenArray:
    """Return a prompt of at most `room` tokens, with other files, of which the last are the most important.

    Half of the room, at most AROUND tokens, is for the text around the cursor; a quarter of that is for the
    suffix. The rest holds as many of the last files as fit completely.
    """
    marks = _marks(vocabulary)
    around = max(0, min(AROUND, (room - N_MARKS) // 2))
    n_after = around // 4
    # Do not tokenize text that cannot fit.
    prefix, suffix = _end(prefix, 2 * LONGEST * AROUND), suffix[: LONGEST * AROUND]
    before = _end(vocabulary.tokenize_inside(prefix), around - n_after)
    after = vocabulary.tokenize_inside(suffix)[:n_after]
    others: list[TokenArray] = []
    left = room - N_MARKS - around
    for file in reversed(files):
        if len(file.text) > LONGEST * left:
            break
        tokens = _marked(vocabulary, f"{file.name}\n{file.text}\n", marks.file)
        left -= len(tokens)
        if left < 0:
            break
        others.insert(0, tokens)
    return _joined(vocabulary, marks, others, before, after)


def _marks(vocabulary: LlamaVocabulary) -> FimTokens:
    if vocabulary.fim is None:
        raise PromptError(
            "this model has no tokens for filling in the middle of a text; "
            "use a model that has them, such as Qwen2.5-Coder"
        )
    return vocabulary.fim


def _marked(vocabulary: LlamaVocabulary, text: str, mark: int | None) -> TokenArray:
    own = [] if mark is None else [mark]
    return np.concatenate((np.array(own, dtype=np.int32), vocabulary.tokenize_inside(text)))


def _joined(
    vocabulary: LlamaVocabulary,
    marks: FimTokens,
    files: Sequence[TokenArray],
    before: TokenArray,
    after: TokenArray,
) -> TokenArray:
    """Return the parts in the model's order."""
    parts = list(files)
    if files and marks.repository is not None:
        parts.insert(0, _marked(vocabulary, f"{REPOSITORY}\n", marks.repository))
    if files and marks.file is not None:
        parts.append(_marked(vocabulary, f"{THIS_FILE}\n", marks.file))
    prefix, suffix, middle = (np.array([mark], dtype=np.int32) for mark in marks[:3])
    return vocabulary.begun(np.concatenate((*parts, prefix, before, suffix, after, middle)))


def _end(text: Text, room: int) -> Text:
    """Return the end of a text, cut at a place that stays the same for many keystrokes."""
    step = max(room // 4, 1)
    return text[-(-max(len(text) - room, 0) // step) * step :]
