"""A training corpus that needs no download: every machine with Python and the `train` extra has it.

It is the standard library, its docstrings, and the docstrings of numpy and torch. Ten modules are held out
for the evaluation; a document that repeats them is dropped.
"""

from __future__ import annotations

import ast
import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KEPT_OUT = (
    "configparser.py", "csv.py", "heapq.py", "json/decoder.py", "queue.py", "shutil.py", "statistics.py",
    "string.py", "textwrap.py", "zipfile.py",
)  # fmt: skip
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pgen2", "_vendor",
    "config", "__pycache__",
}  # fmt: skip
_SKIPPED_FILES = {"pydoc_data/topics.py", "html/entities.py", "stringprep.py", "turtledemo/__init__.py"}
_PACKAGES = ("numpy", "torch")
_LEAST_PROSE = 200  # characters of a docstring; a shorter one teaches little
_LONG_LINE = 30  # characters
_MOST_SHARED = 0.2  # share of a document's long lines that may occur in the kept-out modules


class Document(NamedTuple):
    """A text; its name is also its first line."""

    name: str
    text: str


def collect() -> tuple[list[Document], list[Document]]:
    """Return the training documents, and the held-out modules."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    kept_out = [_code(stdlib, stdlib / name) for name in KEPT_OUT]
    known = {line for document in kept_out for line in _long_lines(document.text)}
    documents: dict[str, Document] = {}  # by their text without the name
    for document in _candidates(stdlib):
        body = document.text.split("\n", 1)[1]
        lines = _long_lines(body)
        if sum(line in known for line in lines) <= _MOST_SHARED * len(lines):
            documents.setdefault(body, document)
    return list(documents.values()), kept_out


def _candidates(stdlib: Path) -> Iterator[Document]:
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        # _sysconfigdata holds the paths of the machine that built this interpreter.
        is_skipped = name in KEPT_OUT or name in _SKIPPED_FILES or name.startswith("_sysconfigdata")
        if not (is_skipped or _in_skipped_folder(path.relative_to(stdlib))):
            yield _code(stdlib, path)
            yield from _docstrings(stdlib, path)
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ValueError(f"the package {package} is not installed; install the 'train' extra")
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            if not _in_skipped_folder(path.relative_to(root)):
                yield from _docstrings(root.parent, path)


def _in_skipped_folder(path: Path) -> bool:
    return any(part in _SKIPPED_FOLDERS or part.startswith("config-") for part in path.parts)


def _code(stdlib: Path, path: Path) -> Document:
    name = path.relative_to(stdlib).as_posix()
    return Document(name, f"# {name}\n{_read(path)}")


def _docstrings(root: Path, path: Path) -> Iterator[Document]:
    try:
        tree = ast.parse(_read(path))
    except SyntaxError:
        return
    module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            name = module if isinstance(node, ast.Module) else f"{module}.{node.name}"
            if len(text) >= _LEAST_PROSE:
                yield Document(name, f"{name}\n\n{text}\n")


def _long_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if len(line.strip()) >= _LONG_LINE]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
