"""Names of models in commands and requests, as llamaspec, Ollama, llama-server and the hub write them.

tests/test_model_names.py.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Sequence, Set

_LONGEST, _N_SHOWN = 200, 5  # characters of a name that are compared; names that are shown
PREFIXES = ("hf:", "hf.co/", "huggingface.co/")
_QUANTIZATION = re.compile(r"[-._:](ud-)?(iq|q|tq)[0-9][a-z0-9_]*$|[-._:](bf16|f16|f32|mxfp4[a-z0-9_]*)$")


def matching(name: str, names: Sequence[Sequence[str]]) -> list[int]:
    """Return the indices of the models that a name means: of one, of none, or of several that it may mean.

    `names` are those of each model. A name is exact, or differs in case, or in ":" for "-" as in Ollama's
    `qwen3:8b`; `:latest` and `.gguf` may follow it. It may leave out the quantization.
    """
    exact = [i for i, several in enumerate(names) if name in several]
    if exact:
        return exact[:1]
    wanted = plain(name)
    for form in (plain, family):
        found = [i for i, several in enumerate(names) if wanted in map(form, several)]
        if found:
            return found
    return []


def choices(name: str, names: Sequence[str]) -> str:
    """Say which models there are, to a client that named none of them: those most like its name, if many."""
    wanted = _triples(name[:_LONGEST])

    def likeness(other: str) -> float:
        triples = _triples(other[:_LONGEST])
        return len(wanted & triples) / len(wanted | triples)

    shown = heapq.nlargest(_N_SHOWN, names, key=likeness)
    n_more = len(names) - len(shown)
    more = f" and {n_more:,} more, which /v1/models lists" if n_more else ""
    return f"this server has {', '.join(shown) or 'no models'}{more}"


def _triples(name: str) -> set[str]:
    """Return all runs of three characters in the parts of a name, with a space before and after each."""
    padded = [f" {part} " for part in plain(name).split("/")]
    return {part[i : i + 3] for part in padded for i in range(max(1, len(part) - 2))}


def distinct(models: Sequence[Sequence[str]], taken: Set[str]) -> list[str]:
    """Return a name for each of several models: the first of its names that no other model wants.

    Models that want the same name, or one that is `taken`, all get their next one. The last name of a model
    is its own even if another one has it.
    """
    at = [0] * len(models)
    while True:
        names = [several[i] for several, i in zip(models, at, strict=True)]
        wanted = Counter([*names, *taken])
        again = [i for i, name in enumerate(names) if wanted[name] > 1 and at[i] + 1 < len(models[i])]
        if not again:
            return names
        for i in again:
            at[i] += 1


def plain(name: str) -> str:
    """Return a name in the form in which names are compared."""
    found = name.strip().lower()
    for prefix in PREFIXES:
        found = found.removeprefix(prefix)
    return found.removesuffix(":latest").removesuffix(".gguf").replace(":", "-")


def quantization_of(name: str) -> str:
    """Return the quantization at the end of a name, in lower case; empty if there is none."""
    found = _QUANTIZATION.search(plain(name))
    return "" if found is None else found[0][1:]


def family(name: str) -> str:
    """Return a name for comparison without its quantization."""
    return _QUANTIZATION.sub("", plain(name))
