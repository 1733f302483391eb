"""Train a pair like the embedded one, on a CPU, from text that comes with Python.

\b
    python scripts/train_demo_pair.py               # into build/demo-pair, in about 90 minutes

The corpus needs no download. It is the standard library with its docstrings, and the docstrings of numpy and
torch. Ten modules are held out for measurements (scripts/draft_prices.py), and documents that repeat them are
dropped.

The target is trained on the corpus. The draft is distilled from the target (scripts/distil_draft.py). An
existing target is not trained again, and after Ctrl-C the same command resumes. The script needs the
``train`` extra.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import torch
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from distil_draft import BATCH, distil, log
from small_llama import Llama, Shape, loss_of, train, write_model

ROOT = Path(__file__).resolve().parent.parent
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
TARGET, DRAFT_LAYERS = Shape(n_layers=8), 3
SHORT = 256  # tokens of a window at first, because short windows learn faster
LONG_FROM = 0.7  # share of the time after which windows are long
MOST_TOKEN_CHARACTERS = 31  # llama-cpp-python's `detokenize` loses tokens of more than 32 bytes
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{{ '\\n' }}{% endfor %}"
ABOUT = "Learned from Python's standard library (PSF-2.0), docstrings of numpy and torch (BSD-3-Clause)."
LICENCE = "weights: MIT; trained on text under PSF-2.0 (Python's standard library) and BSD-3-Clause"
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
_LEAST_PROSE = 200  # characters; shorter docstrings teach little
_LONG_LINE = 30  # characters
_MOST_SHARED = 0.2  # share of a document's long lines that may occur in the kept-out modules


class Document(NamedTuple):
    """A text whose first line is its name."""

    name: str
    text: str


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=Path, default=ROOT / "build" / "demo-pair", show_default=True)
@click.option("--minutes-target", type=float, default=50.0, show_default=True, help="Training time.")
@click.option("--minutes-draft", type=float, default=15.0, show_default=True, help="Training time.")
@click.option("--seed", type=int, default=20261120, show_default=True)
def main(out: Path, minutes_target: float, minutes_draft: float, seed: int) -> None:
    """Train the target, then the draft."""
    target, draft = out / "target.gguf", out / "draft.gguf"
    documents = collect()
    random.Random(seed).shuffle(documents)
    out.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        train_target(target, [document.text for document in documents], minutes_target, seed)
    texts = [document.text.encode() for document in documents]
    distil(target, draft, texts, n_layers=DRAFT_LAYERS, width=TARGET.width, minutes=minutes_draft, seed=seed)


def learn_vocabulary(texts: list[str]) -> Tokenizer:
    """Learn a byte-level BPE with GPT-2's pre-tokeniser, which llama.cpp calls ``gpt-2``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TARGET.n_vocab,
        special_tokens=[BOS, EOS],
        max_token_length=MOST_TOKEN_CHARACTERS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != TARGET.n_vocab:
        raise ValueError(f"the corpus must give {TARGET.n_vocab} tokens, got {tokenizer.get_vocab_size()}")
    tokenizer.encode_special_tokens = True  # `</s>` in a text stays text
    return tokenizer


def train_target(path: Path, texts: list[str], minutes: float, seed: int) -> None:
    """Train the target on the texts and write it."""
    torch.manual_seed(seed)
    tokenizer = learn_vocabulary(texts)
    ids = np.array([i for text in texts for i in (BOS_ID, *tokenizer.encode(text).ids, EOS_ID)])
    log(f"the corpus has {len(ids)} tokens")
    model, chance = Llama(TARGET), np.random.default_rng(seed)

    def batch_loss(done: float) -> Tensor:
        length = SHORT if done < LONG_FROM else TARGET.n_context
        starts = chance.integers(0, len(ids) - length - 1, size=BATCH // length)
        batch = torch.from_numpy(np.stack([ids[start : start + length + 1] for start in starts]))
        with torch.autocast("cpu", torch.bfloat16):
            features = model.hidden(batch[:, :-1]).flatten(0, 1)
        wanted = batch[:, 1:].reshape(-1, 1)
        return loss_of(features, model.embedding.weight, wanted, torch.zeros(len(wanted), 1))

    checkpoint = path.with_suffix(".checkpoint")
    train(
        model,
        batch_loss,
        lambda line, _: log(f"target {line}"),
        checkpoint,
        minutes=minutes,
        rate=5e-3,
        batch_tokens=BATCH,
    )
    write_model(path, model, lambda writer: describe(writer, tokenizer))
    checkpoint.unlink(missing_ok=True)


def describe(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    """Add the metadata and the vocabulary, which distilling copies into the draft."""
    writer.add_name("llamaspec demo target")
    writer.add_description(f"Target of llamaspec's demonstration pair. {ABOUT}")
    writer.add_license("mit")
    writer.add_license_name(LICENCE)
    state = json.loads(tokenizer.to_str())["model"]
    special = [TokenType.CONTROL, TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(state["vocab"], key=state["vocab"].get))
    writer.add_token_types(special + [TokenType.NORMAL] * (TARGET.n_vocab - len(special)))
    writer.add_token_merges([" ".join(pair) for pair in state["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


# The corpus


def collect() -> list[Document]:
    """Return the training documents, none of which repeats the held-out modules."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    kept_out = [_code(stdlib, stdlib / name) for name in KEPT_OUT]
    known = {line for document in kept_out for line in _long_lines(document.text)}
    documents: dict[str, Document] = {}  # by their text without the name
    for document in _candidates(stdlib):
        body = document.text.split("\n", 1)[1]
        lines = _long_lines(body)
        if sum(line in known for line in lines) <= _MOST_SHARED * len(lines):
            documents.setdefault(body, document)
    return list(documents.values())


def _candidates(stdlib: Path) -> Iterator[Document]:
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        # _sysconfigdata contains paths of the machine that built this interpreter.
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


if __name__ == "__main__":
    main()
