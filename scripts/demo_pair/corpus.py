"""Text to learn from, found on any machine that has Python: the standard library and docstrings.

The one idea: the corpus comes with the interpreter and the two packages that training needs anyway
(numpy and torch), so the pair can be made again without a download. Ten modules are kept out for
evaluation, and every document that repeats them is dropped.

It does not know about models. `Corpus.train_ids` is one stream of `<s> document </s>`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

N_VOCAB = 8192
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
_MOST_TOKEN_CHARS = 31  # llama-cpp-python's `detokenize` loses tokens of more than 32 bytes

KEPT_OUT = (
    "configparser.py",
    "csv.py",
    "heapq.py",
    "json/decoder.py",
    "queue.py",
    "shutil.py",
    "statistics.py",
    "string.py",
    "textwrap.py",
    "zipfile.py",
)
"""Modules of the standard library that no training document may repeat."""

_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pgen2", "_vendor",
    "config", "__pycache__",
}  # fmt: skip
_SKIPPED_FILES = {"pydoc_data/topics.py", "html/entities.py", "stringprep.py", "turtledemo/__init__.py"}
_DOCSTRING_PACKAGES = ("numpy", "torch")
_MIN_PROSE_CHARS = 200  # a shorter docstring teaches little and costs two special tokens
_LONG_LINE_CHARS = 30
_MAX_SHARED_LINES = 0.2  # share of a document's long lines that may occur in the kept-out modules


@dataclass(frozen=True)
class Document:
    """One text and where it came from; `name` is also the first line of the text."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The documents, the vocabulary learned from them, and both parts as token ids."""

    tokenizer: Tokenizer
    train_ids: NDArray[np.int64]  # [N], documents in shuffled order
    kept_out: tuple[Document, ...]


def encode(tokenizer: Tokenizer, document: Document) -> list[int]:
    """`<s> document </s>` as ids."""
    return [BOS_ID, *tokenizer.encode(document.text).ids, EOS_ID]


def build(cache: Path, seed: int) -> Corpus:
    """Collect the documents and learn the vocabulary, or read both from `cache`."""
    train, kept_out = collect()
    tokenizer_file, ids_file = cache / "tokenizer.json", cache / "train_ids.npy"
    if ids_file.exists():
        return Corpus(load_tokenizer(tokenizer_file), np.load(ids_file), kept_out)
    tokenizer = learn_vocabulary([document.text for document in train])
    tokenizer.save(str(tokenizer_file))
    random.Random(seed).shuffle(train)
    ids = [token for document in train for token in encode(tokenizer, document)]
    np.save(ids_file, np.asarray(ids, dtype=np.int64))
    return Corpus(tokenizer, np.load(ids_file), kept_out)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a saved vocabulary; `</s>` inside a text stays text, as it must in a corpus."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def learn_vocabulary(texts: list[str], n_vocab: int = N_VOCAB) -> Tokenizer:
    """Byte-level BPE with GPT-2's pre-tokeniser, which llama.cpp knows as ``gpt-2``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=[BOS, EOS],
        max_token_length=_MOST_TOKEN_CHARS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != n_vocab:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, want {n_vocab}")
    tokenizer.encode_special_tokens = True
    return tokenizer


def collect() -> tuple[list[Document], tuple[Document, ...]]:
    """Every training document, and the kept-out modules."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    kept_out = tuple(_code(stdlib, stdlib / name) for name in KEPT_OUT)
    known_lines = {line for document in kept_out for line in _long_lines(document.text)}
    seen: set[str] = set()
    train = []
    for document in _candidates(stdlib):
        body = document.text.split("\n", 1)[1]
        lines = _long_lines(body)
        shared = sum(line in known_lines for line in lines) / max(1, len(lines))
        if body not in seen and shared <= _MAX_SHARED_LINES:
            seen.add(body)
            train.append(document)
    return train, kept_out


def _candidates(stdlib: Path) -> Iterator[Document]:
    """Code of the standard library, its docstrings, its help topics, docstrings of the packages."""
    files = [path for path in sorted(stdlib.rglob("*.py")) if _is_wanted(path.relative_to(stdlib))]
    for path in files:
        yield _code(stdlib, path)
        yield from _docstrings(stdlib, path)
    yield from _topics(stdlib / "pydoc_data" / "topics.py")
    for package in _DOCSTRING_PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ValueError(f"the package {package} is not installed; install the 'train' extra")
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts):
                yield from _docstrings(root.parent, path)


def _is_wanted(relative: Path) -> bool:
    name = relative.as_posix()
    in_skipped = any(part in _SKIPPED_FOLDERS or part.startswith("config-") for part in relative.parts)
    # _sysconfigdata holds the paths of the machine that built this interpreter.
    return not (in_skipped or name in KEPT_OUT or name in _SKIPPED_FILES or name.startswith("_sysconfigdata"))


def _code(stdlib: Path, path: Path) -> Document:
    name = path.relative_to(stdlib).as_posix()
    return Document(name, f"# {name}\n{_read(path)}")


def _docstrings(root: Path, path: Path) -> Iterator[Document]:
    """Yield the dedented docstrings of one file, and long texts handed to ``add_newdoc`` and its kin."""
    try:
        tree = ast.parse(_read(path))
    except SyntaxError:
        return
    module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
    module = module.removesuffix(".__init__")
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            name = module if isinstance(node, ast.Module) else f"{module}.{node.name}"
        elif isinstance(node, ast.Call) and (long := _longest_string(node.args)):
            text, name = inspect.cleandoc(long), module
        else:
            continue
        if text and len(text) >= _MIN_PROSE_CHARS:
            yield Document(name, f"{name}\n\n{text}\n")


def _longest_string(arguments: list[ast.expr]) -> str:
    strings = [a.value for a in arguments if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return max((s for s in strings if "\n" in s), key=len, default="")


def _topics(path: Path) -> Iterator[Document]:
    """Yield the language reference as ``help()`` shows it: a literal dict of name to text."""
    for node in ast.walk(ast.parse(_read(path))):
        if isinstance(node, ast.Dict):
            for name, text in ast.literal_eval(node).items():
                yield Document(str(name), f"{name}\n\n{inspect.cleandoc(text)}\n")


def _long_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if len(line.strip()) >= _LONG_LINE_CHARS]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
