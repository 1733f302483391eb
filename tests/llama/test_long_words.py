"""Words that are longer than the usual stack, for every way in which llama.cpp splits a text into words."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from command import python
from llamaspec import LlamaModel, ModelOptions
from llamaspec.llama import vocabulary
from llamaspec.llama.vocabulary import SHORT, parts_of
from model_store import ModelStore
from tiny_models import Recipe
from tiny_vocabulary import BYTES


def _names(text: str) -> list[str]:
    return text.split()


# The values of tokenizer.ggml.pre, one for each way. llama.cpp splits with std::regex for the first, which
# overflows its stack in a long word, and with code of its own for the others.
WITH_REGEX = _names("""
    afmoe bailingmoe bloom deepseek-coder deepseek-llm deepseek-v3 default exaone-moe falcon gpt-4o
    granite-embed-multi-97m hunyuan-dense hy_v4 jais-2 joyai-llm minicpm5 minimax-m2 poro-chat seed-coder
    spark2_5 tekken tiny_aya ufakzeka viking youtu""")
WITHOUT = _names("""
    chameleon chatglm-bpe codeshell command-r dbrx exaone gpt-2 grok-2 hunyuan jais kimi-k2 laguna llama-bpe
    megrez minerva-7b mpt olmo qwen2 qwen35 refact smaug-bpe smollm stablelm2 starcoder superbpe
    trillion""")
# superbpe takes a time that grows with the square of the length of a number.
LONG = ("Z", "é", " ", "!", "word ")

# Prints the names for which a word of 30,000 characters overflows a stack of 8 MiB, and those for which the
# vocabulary finds other tokens than llama.cpp with a large stack. Each name has a process that may end.
CHILD = """
import os, sys, threading
from pathlib import Path
import numpy as np
from llama_cpp import llama_cpp as lib
from llamaspec import LlamaModel, ModelOptions
from llamaspec.large_stack import with_large_stack

def raw(words, text):
    tokens = np.empty(len(text) + 8, dtype=np.int32)
    return tokens[: lib.llama_tokenize(
        words._vocab, text, len(text), tokens.ctypes.data_as(lib.llama_token_p), len(tokens), False, False)]

def on_small_stack(work):
    threading.stack_size(8 << 20)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

def ends(work):
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0

texts = [(unit * 30_000)[:30_000].encode() for unit in UNITS]
for path in map(Path, sys.argv[1:]):
    with LlamaModel(path, ModelOptions(threads=1)) as model:
        words = model.vocabulary
        if ends(lambda: on_small_stack(lambda: [raw(words, text) for text in texts])):
            print("overflows", path.stem)
        def compare():
            for text in texts:
                large = with_large_stack(lambda: raw(words, text))
                assert (words.tokenize(text, add_special=False) == large).all()
        if ends(lambda: on_small_stack(compare)):
            print("ends", path.stem)
"""


def written(store: ModelStore, folder: Path, names: list[str]) -> list[Path]:
    """Return a file for each name, which is its file's name."""
    paths = []
    for name in names:
        path = store.path("llama", Recipe(vocabulary=replace(BYTES, pre=name)))
        paths.append(folder / f"{name}.gguf")
        paths[-1].symlink_to(path)
    return paths


@pytest.mark.skipif(sys.platform != "linux", reason="the stack that a word takes depends on the C++ library")
def test_a_long_word_ends_nothing(store: ModelStore, tmp_path: Path) -> None:
    """26,400 equal letters in a prompt ended the server."""
    paths = written(store, tmp_path, WITH_REGEX + WITHOUT)
    answer = python(CHILD.replace("UNITS", repr(LONG)), *paths, env={"GGML_NO_BACKTRACE": "1"})
    assert answer.code == 0, answer.stderr
    found = sorted(answer.stdout.split("\n")[:-1])
    assert found == [f"overflows {name}" for name in WITH_REGEX]


LONGER = """
import sys
from pathlib import Path
from llamaspec import LlamaModel, ModelOptions

with LlamaModel(Path(sys.argv[1]), ModelOptions(threads=1)) as model:
    print(len(model.vocabulary.tokenize(b"Z" * 1_500_000, add_special=False)))
"""


def test_a_word_that_is_too_long_for_the_large_stack_is_tokenized_in_parts(
    store: ModelStore, tmp_path: Path
) -> None:
    (path,) = written(store, tmp_path, ["gpt-4o"])
    answer = python(LONGER, path, env={"GGML_NO_BACKTRACE": "1"})
    assert (answer.code, answer.stdout) == (0, "1500000\n"), answer.stderr


@pytest.mark.parametrize(
    "name", _names("bloom deepseek-llm deepseek-v3 exaone-moe falcon gpt-2 gpt-4o jais-2 llama-bpe qwen2")
)
def test_a_text_in_parts_has_the_same_tokens(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    lines = "def f(self):\n\n    return 'the' + 12345\n\n\n# 中文\u3000\n\u3000é!?\r\nend;\n{\n\n}\n"
    text = lines.encode() * 40
    path = store.path("llama", Recipe(vocabulary=replace(BYTES, pre=name)))
    with LlamaModel(path, ModelOptions(threads=1)) as model:
        whole = model.vocabulary.tokenize(text).tolist()
        monkeypatch.setattr(vocabulary, "LONGEST", 200)
        assert len(text) > SHORT
        assert len([*parts_of(text)]) > 10
        assert model.vocabulary.tokenize(text).tolist() == whole


def test_parts_of_a_long_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "LONGEST", 10)
    assert [*parts_of(b"aaaa\nbb\nccccc\n")] == [b"aaaa\nbb\n", b"ccccc\n"]
    assert [*parts_of("é".encode() * 11)] == ["é".encode() * 5, "é".encode() * 5, "é".encode()]
    assert [*parts_of("a中中中中".encode())] == ["a中中中".encode(), "中".encode()]
    assert [*parts_of(b"a\n\n\n\n\n\n\n\n\nb\nc")] == [b"a\n\n\n\n\n\n\n\n\n", b"b\nc"]
