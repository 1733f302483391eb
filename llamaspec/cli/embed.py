"""`llamaspec embed`: write the vectors of texts, or their scores for a query, as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from llamaspec.cli import options as shared
from llamaspec.cli.model_options import ALMOST, KERNELS_OPTION, complete_names, fetched_model
from llamaspec.cli.option_groups import Decorator, GroupedCommand, Integer, option_group
from llamaspec.cli.output import SlowProgress
from llamaspec.embedder import Embedder, open_embedder, unit_vectors
from llamaspec.errors import LlamaspecError, PromptError
from llamaspec.llama.options import FLASH_ATTENTION, ModelOptions

N_AT_ONCE = 256  # texts whose lines are written together

_MODEL: tuple[Decorator, ...] = (
    click.option("--target", "--model", "-m", "target", metavar="MODEL", required=True,
                 shell_complete=complete_names,
                 help="An embedding model or a reranker: a file, a name from llamaspec models list, or "
                      "hf:owner/repo:FILE."),
    click.option("--n-ctx", "--ctx-size", "-c", type=int,
                 help="Longest text in tokens; default: what the model was trained on, if memory allows."),
    click.option("--gpu-layers", "-ngl", type=int, help="Layers on the GPU; default: all that fit."),
    click.option("--threads", type=int, help="Threads; default: the free full-speed cores."),
    click.option("--flash-attn", "flash_attention", type=click.Choice(list(FLASH_ATTENTION)), default="auto",
                 show_default=True, help="Flash attention; auto = llama.cpp decides."),
    KERNELS_OPTION,
)  # fmt: skip


def _model(*, target: str, **given: Any) -> tuple[str, ModelOptions]:
    return target, ModelOptions(**given)


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec embed -m nomic-embed-text.gguf "search_query: Who was Ada Lovelace?"
  llamaspec embed -m bge-small.gguf -f lines.txt --dimensions 256 > vectors.jsonl
  llamaspec embed -m bge-reranker.gguf --query "What is a panda?" -f documents.txt
""",
)
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("--file", "-f", metavar="PATH", help="File with a text in each line; - is stdin, the default.")
@click.option("--query", metavar="TEXT", help="Write how well each text answers this, by a reranker.")
@click.option(
    "--dimensions",
    type=Integer(min=1),
    help="Only the first numbers of each vector, for models that were trained for that.",
)
@option_group("model", _model, _MODEL)
def embed(
    model: tuple[str, ModelOptions],
    texts: tuple[str, ...],
    file: str | None,
    query: str | None,
    dimensions: int | None,
) -> None:
    """Write the vector of each TEXT as a line of JSON.

    Vectors have length 1. Prefixes that a model was trained with, such as "search_query: ", are yours to
    write.
    """
    if texts and file is not None:
        raise click.UsageError("give the texts once: as arguments or with --file")
    if query is not None and dimensions is not None:
        raise click.UsageError("--query gives scores, which have no --dimensions")
    given = texts or _lines(file)
    name, options = model
    with SlowProgress("loading") as progress:
        path = fetched_model(name)
        embedder = open_embedder(path, options=options, on_load=lambda done: progress(min(done, ALMOST)))
    with embedder:
        for i, line in enumerate(_answers(embedder, name, given, query, dimensions)):
            click.echo(json.dumps({"index": i, **line}))


def _answers(
    embedder: Embedder, name: str, texts: Sequence[str], query: str | None, dimensions: int | None
) -> Iterator[dict[str, Any]]:
    """Yield what is written of each text. What cannot be done is known before the first."""
    model = embedder.model
    if model.ranks != (query is not None):
        remedy = "is a reranker; give it a --query" if model.ranks else "is no reranker; drop --query"
        raise LlamaspecError(f"{name} {remedy}")
    if dimensions is not None and dimensions > model.size:
        raise LlamaspecError(f"--dimensions must be from 1 to {model.size}, got {dimensions}")
    if query is None:
        tokens = [embedder.tokens(text) for text in texts]
    else:
        tokens = [embedder.pair_tokens(query, text) for text in texts]
    embedder.check(tokens)
    for start in range(0, len(tokens), N_AT_ONCE):
        some = tokens[start : start + N_AT_ONCE]
        rows = embedder.run(embedder.request(some))
        vectors = (rows if model.ranks else unit_vectors(rows, dimensions)).tolist()
        for each, vector in zip(some, vectors, strict=True):
            yield {"score": vector[0]} if model.ranks else {"tokens": len(each), "embedding": vector}


def _lines(name: str | None) -> list[str]:
    """Return the lines of a file, or of stdin, that are not empty; PromptError if there are none."""
    content = b""
    if name not in (None, "-"):
        content = shared.read_input(Path(str(name)), "file")
    elif sys.stdin is not None and not (name is None and sys.stdin.isatty()):
        content = sys.stdin.buffer.read()
    lines = shared.decoded(content, f"the text of {name or 'stdin'}").splitlines()
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise PromptError("there is no text; give some as arguments, or a line for each")
    return texts
