"""Names of models in requests: as llamaspec lists them, and as Ollama, llama-server and the hub write them.

tests/serve/test_model_names.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_PREFIXES = ("hf:", "hf.co/", "huggingface.co/")
_QUANTIZATION = re.compile(r"[-._:](ud-)?(iq|q|tq)[0-9][a-z0-9_]*$|[-._:](bf16|f16|f32|mxfp4[a-z0-9_]*)$")


def matching(name: str, names: Sequence[Sequence[str]]) -> int | None:
    """Return the index of the model that a request means; `names` are those of each model.

    A name is exact, or differs in case, or in ":" for "-" as in Ollama's `qwen3:8b`; `:latest` and `.gguf`
    may follow it. It may leave out the quantization if only one model has the rest of the name. Otherwise
    None.
    """
    exact = [i for i, several in enumerate(names) if name in several]
    if exact:
        return exact[0]
    wanted = plain(name)
    for form in (plain, _family):
        found = [i for i, several in enumerate(names) if wanted in map(form, several)]
        if len(found) == 1:
            return found[0]
    return None


def plain(name: str) -> str:
    """Return a name in the form in which names are compared."""
    found = name.strip().lower()
    for prefix in _PREFIXES:
        found = found.removeprefix(prefix)
    return found.removesuffix(":latest").removesuffix(".gguf").replace(":", "-")


def quantization_of(name: str) -> str:
    """Return the quantization at the end of a name, in lower case; empty if there is none."""
    found = _QUANTIZATION.search(plain(name))
    return "" if found is None else found[0][1:]


def _family(name: str) -> str:
    """Return a name for comparison without its quantization."""
    return _QUANTIZATION.sub("", plain(name))
