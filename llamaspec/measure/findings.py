"""What a check of `doctor` finds, and the checks of options and llama.cpp that other commands make, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llamaspec.errors import LlamaspecError
from llamaspec.kernels import OFF
from llamaspec.llama import runtime
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import ModelOptions, cache_bytes

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    level: str  # ok, warning or problem
    topic: str
    text: str
    remedy: str | None = None  # None if nothing needs to be done
    error: LlamaspecError | None = None  # the reported error, if any

    @classmethod
    def of_error(cls, topic: str, error: LlamaspecError) -> Finding:
        """Make a problem of an error; a remedy in its message follows the last semicolon."""
        text, _, remedy = str(error).rpartition("; ")
        return cls(PROBLEM, topic, text or str(error), remedy if text else None, error)


def check(topic: str, text: str, is_fine: bool, fault: str, remedy: str, *options: str) -> Finding:
    """Return OK, or a warning whose text ends with the fault and whose remedy ends with `options`."""
    if is_fine:
        return Finding(OK, topic, text)
    return Finding(WARNING, topic, text + fault, f"{remedy} ({', '.join(options)})" if options else remedy)


def llama_cpp_misfit(options: ModelOptions) -> str | None:
    """Return how another llama.cpp keeps our kernels off, and a remedy; None if nobody misses them."""
    # With the option first: asking for the kernels may turn them on.
    if options.kernels == OFF or not runtime.kernels().is_misfit:
        return None
    return runtime.kernels().describe()


def option_findings(role: str, model: LlamaModel) -> Iterator[Finding]:
    """Yield findings about a model's options; every command that loads the model shows the warnings."""
    options = model.options
    context = f"{model.context_size} tokens, trained on {model.trained_context_size}"
    asked, most = options.n_ctx, model.trained_context_size
    yield check(
        f"{role} context", context, asked is None or asked <= most,
        ": text may degrade beyond that", f"use {most} tokens or fewer",
        "--n-ctx" if role == "target" else "--draft-ctx",
    )  # fmt: skip
    types = options.cache_type_k, options.cache_type_v
    yield check(
        f"{role} KV types", f"keys {types[0]}, values {types[1]}",
        role != "draft" or min(map(cache_bytes, types)) >= cache_bytes("q8_0"),
        ": below q8_0, acceptance drops", "use q8_0 or f16 for both",
        "--draft-cache-type-k", "--draft-cache-type-v",
    )  # fmt: skip
