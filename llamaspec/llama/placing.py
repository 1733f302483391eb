"""Places the models of files that are not loaded: reads what they need, looks at the GPUs, and sets options.

What a person has said stays: layers and devices that options name are not touched. `placement.py` decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llamaspec.llama import runtime
from llamaspec.llama.context_size import default_context_size
from llamaspec.llama.devices import Device, find_devices, gpus_among
from llamaspec.llama.facts import active_parameters
from llamaspec.llama.gguf_tensors import GgufTensors, file_parts, read_tensors
from llamaspec.llama.options import BATCH, CACHE_BYTES, ModelOptions
from llamaspec.llama.placement import Gpus, ModelBytes, Paces, Placement, choose_placement

_LAYER = re.compile(r"blk\.(\d+)\.")
LOGITS_BYTES = 64 << 20  # of the positions that a context scores, with a large vocabulary


@dataclass(frozen=True, slots=True)
class Placed:
    """How a target and its drafts are loaded, and why so."""

    target: ModelOptions
    draft: ModelOptions
    placement: Placement | None  # None: there was nothing to decide


def place_models(
    target: tuple[Path, ModelOptions],
    drafts: tuple[Sequence[Path], ModelOptions],
    *,
    devices: Sequence[Device] | None = None,
    main_bytes: int | None = None,
    paces: Paces | None = None,
) -> Placed:
    """Decide which layers go to the GPUs.

    Parameters
    ----------
    target : (file, options)
    drafts : (files, their options)
        The draft and its own drafts, which stay together; none of them is a prediction head.
    devices : sequence of Device, optional
        Default: this machine's.
    main_bytes : int, optional
        Free main memory; default: this machine's.
    paces : Paces, optional
        What evaluations cost; default: what is assumed of such a machine.

    Returns
    -------
    Placed
        The options as they came where there is no GPU, nothing is left to decide, devices, their shares or
        workers were named, or a file cannot be read (whoever loads it says why).
    """
    path, options = target
    paths, draft_options = drafts
    as_given = Placed(options, draft_options, None)
    if any(each.devices or each.tensor_split or each.workers for each in (options, draft_options)):
        return as_given
    if _is_fixed(options) and (_is_fixed(draft_options) or not paths):
        return as_given
    found = gpus_among(find_devices() if devices is None else devices)
    if not found:
        return as_given
    main_bytes = runtime.available_bytes() if main_bytes is None else main_bytes
    gpus = Gpus(
        tuple(device.name for device in found),
        tuple(device.free_bytes for device in found),
        main_bytes,
        is_unified=all(device.is_unified for device in found),
    )
    room = sum(gpus.free_bytes)
    needs = model_bytes(path, options, room)
    of_drafts = [model_bytes(draft, draft_options, room) for draft in paths]
    if needs is None or None in of_drafts:
        return as_given
    draft = _together([each for each in of_drafts if each is not None])
    placement = choose_placement(gpus, needs, draft, paces)
    return Placed(
        _with_layers(options, placement.target_layers),
        _with_layers(draft_options, placement.draft_layers),
        placement,
    )


def has_gpus() -> bool:
    """Whether there is anything to decide on this machine."""
    return bool(gpus_among(find_devices()))


def computing_devices(options: ModelOptions, n_layers: int) -> frozenset[str]:
    """What a model loaded like this computes on, on this machine; `n_layers` without the output."""
    found = find_devices()
    names = options.devices
    if names is None:
        names = tuple(device.name for device in gpus_among(found)) if options.offloads else ()
    is_whole = options.gpu_layers is None or options.gpu_layers > n_layers
    if not names or not options.offloads:
        return frozenset({"CPU"})
    return frozenset(names) if is_whole else frozenset({*names, "CPU"})


def model_bytes(path: Path, options: ModelOptions, room: int) -> ModelBytes | None:
    """What a model needs; None where the file does not tell.

    Parameters
    ----------
    path : Path
    options : ModelOptions
    room : int
        Bytes that are free for it: its default context depends on them.
    """
    try:
        parts = [read_tensors(part) for part in file_parts(path)]
        n_file = sum(part.stat().st_size for part in file_parts(path))
    except OSError:
        return None
    head, sizes = parts[0], {name: n for part in parts for name, n in part.n_bytes.items()}
    architecture = head.texts.get("general.architecture", "")

    def number(key: str, default: int = 0) -> int:
        return head.numbers.get(f"{architecture}.{key}", default)

    n_layers, n_heads, width = (
        number("block_count"),
        number("attention.head_count"),
        number("embedding_length"),
    )
    if not (0 < n_layers <= 1024 and width and sizes):
        return None
    layers = [0] * n_layers
    for name, n_bytes in sizes.items():
        found = _LAYER.match(name)
        if found is not None and int(found[1]) < n_layers:
            layers[int(found[1])] += n_bytes
    output = sum(n_bytes for name, n_bytes in sizes.items() if name.startswith("output"))
    if "output.weight" not in sizes:  # the embedding serves, and a copy of it goes to the GPU
        output += sizes.get("token_embd.weight", 0)
    per_token = _cache_per_token(head, architecture, options)
    n_ctx = options.n_ctx or default_context_size(
        number("context_length"), n_layers * per_token, n_file, room
    )
    n_cells = max(n_ctx, options.n_cells or 0)
    n_ffn = number("feed_forward_length") or number("expert_feed_forward_length") * number(
        "expert_used_count"
    )
    return ModelBytes(
        layers=(*layers, output),
        cache=round(per_token * n_cells),
        compute=_compute_bytes(options, width, n_ffn, n_heads, n_cells),
        read_share=_read_share(parts, architecture),
        n_fixed=_n_fixed(options, n_layers + 1),
    )


def _cache_per_token(head: GgufTensors, architecture: str, options: ModelOptions) -> float:
    """Bytes of keys and values for one layer, as a mean of all."""

    def number(key: str, default: int = 0) -> int:
        return head.numbers.get(f"{architecture}.{key}", default)

    n_layers, n_heads = number("block_count"), number("attention.head_count")
    each = head.arrays.get(f"{architecture}.attention.head_count_kv")
    if each:
        n_kv = sum(each) / n_layers
    else:
        n_kv = number("attention.head_count_kv", n_heads) / max(1, number("full_attention_interval", 1))
    size = number("attention.key_length", number("embedding_length") // max(1, n_heads))
    of_key, of_value = CACHE_BYTES[options.cache_type_k], CACHE_BYTES[options.cache_type_v]
    return n_kv * (size * of_key + number("attention.value_length", size) * of_value)


def _compute_bytes(options: ModelOptions, width: int, n_ffn: int, n_heads: int, n_cells: int) -> int:
    """Roughly llama.cpp's compute buffer, fitted to what it reports for batches of BATCH positions."""
    per_position = 4 * (2 * n_ffn + 9 * width) + n_cells * 2.4
    if options.flash_attention == "off":
        per_position += 4.4 * n_heads * n_cells
    return round(BATCH * per_position) + LOGITS_BYTES


def _read_share(parts: Sequence[GgufTensors], architecture: str) -> float:
    """Of the weights, what one token reads."""
    texts: Mapping[str, object] = {**parts[0].texts, **parts[0].numbers}
    n_all = sum(part.n_parameters for part in parts)
    used = active_parameters(lambda key: str(texts[key]) if key in texts else None, n_all)
    return used / n_all if used else 1.0


def _is_fixed(options: ModelOptions) -> bool:
    return options.gpu_layers is not None or options.devices is not None


def _n_fixed(options: ModelOptions, n_layers: int) -> int | None:
    if not _is_fixed(options):
        return None
    return 0 if not options.offloads else min(n_layers, options.gpu_layers or n_layers)


def _together(drafts: Sequence[ModelBytes]) -> ModelBytes | None:
    """A draft with its own drafts as one model."""
    if len(drafts) < 2:
        return drafts[0] if drafts else None
    first = drafts[0]
    return ModelBytes(
        layers=tuple(n_bytes for draft in drafts for n_bytes in draft.layers),
        cache=max(draft.cache for draft in drafts),
        compute=sum(draft.compute for draft in drafts),
        read_share=first.read_share,
        n_fixed=None if first.n_fixed is None else sum(draft.n_fixed or 0 for draft in drafts),
    )


def _with_layers(options: ModelOptions, n_layers: int | None) -> ModelOptions:
    """The options with so many layers on the GPUs, unless they say how many."""
    if n_layers is None or _is_fixed(options):
        return options
    if n_layers:
        return replace(options, gpu_layers=n_layers)
    return replace(options, devices=())
