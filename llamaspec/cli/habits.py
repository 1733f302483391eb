"""Habits from llama.cpp and Ollama: their other names for our options, options that have no effect here, and
their environment variables.

Whatever is ignored is named in one line. tests/cli/test_habits.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click

from llamaspec.cli.output import say

WARM = 1.5  # a larger value of -t is probably a number of threads
_NUMBER = re.compile(r"-t=?([0-9.]+)")

_NAMES = {
    "-t": "--threads", "-fa": "--flash-attn", "-np": "--parallel", "-a": "--alias",
    "-to": "--request-timeout", "--timeout": "--request-timeout", "-cram": "--cache-ram",
    "--sleep-idle-seconds": "--keep-alive",
    "-s": "--seed", "--predict": "--max-tokens", "--n-predict": "--max-tokens",
    "-sys": "--system", "--system-prompt": "--system", "--chat-template-file": "--chat-template",
    "-ctk": "--cache-type-k", "-ctv": "--cache-type-v",
    "-ctkd": "--draft-cache-type-k", "--cache-type-k-draft": "--draft-cache-type-k",
    "-ctvd": "--draft-cache-type-v", "--cache-type-v-draft": "--draft-cache-type-v",
    "--draft-max": "--draft-length", "--draft-n": "--draft-length", "--spec-draft-n-max": "--draft-length",
    "--n-gpu-layers": "--gpu-layers", "-ngld": "--draft-gpu-layers",
    "--gpu-layers-draft": "--draft-gpu-layers", "--n-gpu-layers-draft": "--draft-gpu-layers",
    "--device-draft": "--draft-device", "-td": "--draft-threads", "--threads-draft": "--draft-threads",
}  # fmt: skip


class _Ignored(NamedTuple):
    """An option that has no effect here, and why."""

    why: str
    has_value: bool = False


_MAPPED = _Ignored("weights are always mapped, and the system keeps them in memory")
_CHUNKS = _Ignored("prompts are processed in chunks that fit the machine", has_value=True)
_LENGTH = _Ignored("the length of drafts follows from measurements; see --draft-length", has_value=True)
_ALWAYS = _Ignored("it is always on")
_KIND = _Ignored("the file says whether a model makes vectors or scores")
_IGNORED = {
    "--mlock": _MAPPED, "--mmap": _MAPPED, "--no-mmap": _MAPPED,
    "--jinja": _Ignored("chat templates are always Jinja"),
    "--numa": _Ignored("start the command with numactl for that", has_value=True),
    "-b": _CHUNKS, "--batch-size": _CHUNKS, "-ub": _CHUNKS, "--ubatch-size": _CHUNKS,
    "-tb": _Ignored("--threads is for prompts, too", has_value=True),
    "--threads-batch": _Ignored("--threads is for prompts, too", has_value=True),
    "--draft-min": _LENGTH, "--draft-n-min": _LENGTH, "--draft-p-min": _LENGTH, "--spec-draft-n-min": _LENGTH,
    "--spec-draft-p-min": _LENGTH,
    "-cb": _ALWAYS, "--cont-batching": _ALWAYS, "--metrics": _ALWAYS, "--slots": _ALWAYS, "--props": _ALWAYS,
    "--embedding": _KIND, "--embeddings": _KIND, "--rerank": _KIND, "--reranking": _KIND,
    "--pooling": _Ignored("the file says how the rows of a text become one", has_value=True),
    "--no-warmup": _Ignored("there is no warm-up"),
    "--no-context-shift": _Ignored("contexts are never shifted"),
}  # fmt: skip


def translated(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Return arguments with our names for options; `known` are those of the command.

    Raises
    ------
    UsageError
        -t has a temperature that is probably meant as a number of threads.
    """
    found: list[str] = []
    left = iter(arguments)
    for argument in left:
        name, is_joined, value = argument.partition("=") if argument.startswith("-") else (argument, "", "")
        if argument == "--":
            return [*found, argument, *left]
        if name in _IGNORED and name not in known:
            ignored = _IGNORED[name]
            if ignored.has_value and not is_joined:
                next(left, None)
            say(f"{name} is ignored: {ignored.why}")
            continue
        ours = _NAMES.get(name, name)
        is_other = name not in known and ours in known
        found += [ours, *([value] if is_joined else [])] if is_other else [argument]
        if ours == "--flash-attn" and not is_joined:
            found += _flash_attention(left)
    _check_temperature(found, known)
    return found


def _flash_attention(left: Iterator[str]) -> list[str]:
    """Return the value of -fa, which may be missing, and what follows it."""
    given = next(left, None)
    if given in ("on", "off", "auto"):
        return [given]
    return ["on"] if given is None else ["on", given]


def _check_temperature(arguments: Sequence[str], known: Collection[str]) -> None:
    if "-t" not in known:
        return
    for i, argument in enumerate(arguments):
        joined = _NUMBER.fullmatch(argument)
        value = joined[1] if joined else "".join(arguments[i + 1 : i + 2]) if argument == "-t" else ""
        if re.fullmatch(r"[0-9]+(\.[0-9]*)?", value) and float(value) > WARM:
            raise click.UsageError(
                f"-t is the temperature, not the number of threads, and {value} would give random text; "
                f"use --threads {value}, or --temp {value}"
            )


# Environment variables of llama-server and Ollama -> parameters of `serve`.
_VARIABLES = {
    "LLAMA_ARG_MODEL": "target", "LLAMA_ARG_MODEL_DRAFT": "draft", "LLAMA_ARG_ALIAS": "alias",
    "LLAMA_ARG_HOST": "host", "LLAMA_ARG_PORT": "port", "LLAMA_ARG_N_PARALLEL": "parallel",
    "LLAMA_ARG_CTX_SIZE": "n_ctx", "LLAMA_ARG_THREADS": "threads", "LLAMA_ARG_N_GPU_LAYERS": "gpu_layers",
    "LLAMA_ARG_N_GPU_LAYERS_DRAFT": "draft_gpu_layers", "LLAMA_ARG_DEVICE": "device",
    "LLAMA_ARG_TENSOR_SPLIT": "tensor_split", "LLAMA_ARG_FLASH_ATTN": "flash_attn",
    "LLAMA_ARG_CACHE_TYPE_K": "cache_type_k", "LLAMA_ARG_CACHE_TYPE_V": "cache_type_v",
    "LLAMA_ARG_CACHE_RAM": "cache_ram_mib", "LLAMA_ARG_CHAT_TEMPLATE": "chat_template",
    "LLAMA_ARG_CHAT_TEMPLATE_FILE": "chat_template", "LLAMA_ARG_DRAFT_MAX": "draft_length",
    "LLAMA_ARG_MODELS_DIR": "models_dir", "LLAMA_ARG_MODELS_MAX": "max_models",
    "LLAMA_ARG_TIMEOUT": "request_timeout", "LLAMA_API_KEY": "api_keys",
    "OLLAMA_KEEP_ALIVE": "keep_alive", "OLLAMA_CONTEXT_LENGTH": "ctx_per_request",
    "OLLAMA_NUM_PARALLEL": "parallel", "OLLAMA_MAX_LOADED_MODELS": "max_models",
    "OLLAMA_MAX_QUEUE": "max_queue",
}  # fmt: skip
_SEVERAL = ("target", "draft", "api_keys")  # parameters that take a list
_HINTS = {"OLLAMA_MODELS": "Ollama's folder has no GGUF files with names; use --models-dir or models add"}
_PREFIXES = ("LLAMA_ARG_", "OLLAMA_")


def borrowed_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return parameters of `serve` from variables of llama-server and Ollama; name those that are ignored."""
    found: dict[str, Any] = {}
    taken, ignored = [], []
    for name, value in environment.items():
        if not value or not (name.startswith(_PREFIXES) or name in _VARIABLES):
            continue
        parameter = _VARIABLES.get(name)
        if name == "OLLAMA_HOST":
            found |= _address(value)
        elif parameter is not None:
            found[parameter] = [value] if parameter in _SEVERAL else value
        else:
            ignored.append(name)
            continue
        taken.append(name)
    if taken:
        say(f"settings are taken from {', '.join(sorted(taken))}; options come before them")
    for name in sorted(ignored):
        say(f"{name} is ignored: {_HINTS.get(name, 'it has no meaning here')}")
    return found


def _address(value: str) -> dict[str, Any]:
    """Return the host, and the port if there is one, of an address such as 0.0.0.0:11434 or http://name."""
    try:
        parts = urlsplit(value if "://" in value else f"//{value}")
        port = parts.port
    except ValueError as error:
        raise click.UsageError(f"OLLAMA_HOST is no address: {value}; use HOST:PORT") from error
    return {
        **({} if parts.hostname is None else {"host": parts.hostname}),
        **({} if port is None else {"port": port}),
    }
