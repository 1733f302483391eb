"""A plan as a GGUF file: metadata first, then one tensor at a time, so that memory stays small.

The file appears under its name only when it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from widening.plan import N_SHARED, Plan, Target
from widening.source import UnsuitableFileError

DROPPED = {"general.architecture", "general.size_label", "general.parameter_count"}
DROPPED |= {"general.quantization_version", "general.file_type", "general.quantized_by"}
WITH_EXPERTS = "deepseek"  # a Llama whose feed-forwards may be experts, some of which all tokens share
FILE_TYPES = {"F32": 0, "F16": 1}  # llama.cpp's numbers


def write(plan: Plan, path: Path, report: Callable[[str, int], None]) -> None:
    """Write the wide model; `report` hears (tensor, bytes) after each.

    Raises
    ------
    UnsuitableFileError
        The disk has no room, or the file would replace its own source.
    """
    targets = list(plan.targets())
    if path.exists() and path.samefile(plan.source.path):
        raise UnsuitableFileError(f"{path} is the source itself: choose another output")
    path.parent.mkdir(parents=True, exist_ok=True)
    n_bytes = sum(n_bytes_of(plan, target) for target in targets)
    n_free = shutil.disk_usage(path.parent).free
    if n_bytes > n_free:
        raise UnsuitableFileError(f"{path} needs {n_bytes / 1e9:.1f} GB, and {n_free / 1e9:.1f} GB are free")
    unfinished = path.with_name(path.name + ".part")
    try:
        _write_to(plan, targets, unfinished, report)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def n_bytes_of(plan: Plan, target: Target) -> int:
    """The size of one tensor in the file."""
    n = 1
    for size in target.shape:
        n *= size
    return n * (2 if _type_of(plan, target) == GGMLQuantizationType.F16 else 4)


def _type_of(plan: Plan, target: Target) -> GGMLQuantizationType:
    half = target.is_matrix and plan.widening.dtype == "F16"
    return GGMLQuantizationType.F16 if half else GGMLQuantizationType.F32


def _write_to(plan: Plan, targets: list[Target], path: Path, report: Callable[[str, int], None]) -> None:
    writer = gguf.GGUFWriter(path, _architecture(plan))
    _add_metadata(writer, plan)
    for target in targets:
        kind = _type_of(plan, target)
        writer.add_tensor_info(
            target.name, target.shape, _dtype(kind), n_bytes_of(plan, target), raw_dtype=kind
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for target in targets:
            writer.write_tensor_data(plan.compute(target).astype(_dtype(_type_of(plan, target)), copy=False))
            report(target.name, n_bytes_of(plan, target))
    finally:
        writer.close()


def _architecture(plan: Plan) -> str:
    return WITH_EXPERTS if plan.widening.n_experts else plan.source.architecture


def _dtype(kind: GGMLQuantizationType) -> np.dtype[Any]:
    return np.dtype(np.float16 if kind == GGMLQuantizationType.F16 else np.float32)


def _add_metadata(writer: gguf.GGUFWriter, plan: Plan) -> None:
    """The source's metadata, with the sizes of the wide model."""
    changed = _changed(plan)
    for key, field in plan.source.reader.fields.items():
        if key in DROPPED or key.startswith("GGUF."):
            continue
        key = key.replace(f"{plan.source.architecture}.", f"{_architecture(plan)}.")
        value = changed.pop(key, None)
        value = field.contents() if value is None else value
        if value == []:
            continue  # the writer has no empty arrays
        kinds = field.types
        writer.add_key_value(key, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for key, value in changed.items():
        kind = GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32
        writer.add_key_value(key, value, kind)
    writer.add_file_type(FILE_TYPES[plan.widening.dtype])


def _changed(plan: Plan) -> dict[str, Any]:
    """Metadata that widening changes."""
    source, factor, sizes = plan.source, plan.widening.factor, plan.source.sizes
    n_blocks = plan.n_layers + sizes.n_heads_behind
    numbers: dict[str, Any] = {
        "block_count": n_blocks,
        "embedding_length": plan.width,
        "feed_forward_length": sizes.n_ffn * factor,
        "attention.head_count": sizes.n_heads * factor,
        "attention.head_count_kv": sizes.n_kv_heads * plan.widening.n_kv,
        "attention.key_length": sizes.head_size,
        "attention.value_length": sizes.head_size,
        "rope.dimension_count": int(source.size("rope.dimension_count", sizes.head_size)),
        "attention.layer_norm_rms_epsilon": plan.epsilon,
        "vocab_size": sizes.n_vocabulary,
    }
    if source.architecture == "step35":
        numbers["expert_feed_forward_length"] = sizes.n_ffn * factor
        numbers["attention.sliding_window_pattern"] = [True] * n_blocks
    if plan.widening.n_experts:
        numbers |= {
            "expert_count": plan.widening.n_experts,
            "expert_used_count": plan.widening.n_used,
            "expert_shared_count": N_SHARED,
            "expert_feed_forward_length": sizes.n_ffn * factor // N_SHARED,
            "leading_dense_block_count": 0,
            "expert_weights_scale": 1.0,
        }
    changed = {f"{_architecture(plan)}.{key}": value for key, value in numbers.items()}
    if name := source.reader.get_field("general.name"):
        changed["general.name"] = f"{name.contents()} widened {plan.widening.label}"
    return changed
