#!/usr/bin/env python
"""Open thousands of damaged GGUF files in one process, which must survive all of them.

\b
    python scripts/fuzz_gguf.py --count 1000 tiny-*.gguf

Each seed makes one damaged file: the script reads a sound file into its parts, changes some of them at
random, and writes it again. So most damage passes a reader's first checks. A worker process opens each file
and generates a few tokens. There are five faults: the worker crashes, hangs, grows by 1 GiB, raises an error
that is not a `LlamaspecError`, or raises one whose message is not one line with a remedy. The script keeps
the file of a fault in `--out`. The last line on stdout is JSON. The exit code is 1 if there was a fault.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import re
import resource
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import gguf

from llamaspec import FixedLength, LlamaspecError, ModelOptions, open_pair

HANG_SECONDS = 300.0  # opening a small file never takes this long
MAX_GROWTH = 1 << 30  # bytes by which the worker's peak memory may grow for one file
FAULTS = ("crash", "hang", "traceback", "growth", "message")

STRING, ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_INTEGERS = (0, 1, 2, 3, 5, 7, 8, 31, 33, 127, 255, 256, 4097, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, -1)
_FLOATS = (0.0, -1.0, 1e-30, 1e30, 1e38, math.nan, math.inf, -math.inf)
_STRINGS = (
    b"", b"\xff\xfe", b"llama", b"mamba", b"mamba2", b"gemma3", b"qwen2moe", b"deepseek2", b"rwkv7", b"bert",
    b"t5", b"gpt2", b"jamba", b"lfm2", b"no_vocab", b"none", b"yarn", b"longrope", b"{{ x", b"x" * 70_000,
    b"ugm", b"spm", b"rwkv", b"plamo2", b"default", b"llama-bpe", b"gpt-oss", b"\0", b"a\nb",
)  # fmt: skip
_ADDED = (
    "general.alignment", "split.count", "split.no", "split.tensors.count", "{a}.expert_count",
    "{a}.expert_used_count", "{a}.expert_group_count", "{a}.rope.dimension_count", "{a}.rope.freq_base",
    "{a}.rope.scaling.type", "{a}.rope.scaling.factor", "{a}.rope.scaling.original_context_length",
    "{a}.attention.key_length", "{a}.attention.value_length", "{a}.attention.sliding_window",
    "{a}.attention.head_count_kv", "{a}.attention.layer_norm_rms_epsilon", "{a}.attention.causal",
    "{a}.attention.clamp_kqv", "{a}.attention.scale", "{a}.logit_scale", "{a}.residual_scale",
    "{a}.leading_dense_block_count", "{a}.vocab_size", "{a}.pooling_type", "{a}.feed_forward_length",
    "{a}.nextn_predict_layers", "{a}.full_attention_interval", "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.padding_token_id", "tokenizer.ggml.mask_token_id", "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.token_type_count", "tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.pre",
    "tokenizer.ggml.remove_extra_whitespaces", "tokenizer.chat_template", "quantize.imatrix.chunks_count",
)  # fmt: skip


@dataclass
class Entry:
    """A metadata entry."""

    key: bytes
    kind: int
    value: Any
    element_kind: int = 0  # of an array


@dataclass
class Tensor:
    """An entry of the tensor list."""

    name: bytes
    shape: list[int]
    kind: int
    offset: int


@dataclass
class Parts:
    """The parts of a GGUF file."""

    version: int = 3
    entries: list[Entry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""
    n_more_entries: int = 0  # error of the header's count of entries
    n_more_tensors: int = 0  # error of the header's count of tensors

    def entry(self, rng: random.Random) -> Entry:
        """Return a random entry."""
        return rng.choice(self.entries)


def take_apart(path: Path) -> Parts:
    """Read a sound file."""
    reader = gguf.GGUFReader(path)
    parts = Parts(data=path.read_bytes()[reader.data_offset :])
    for entry in reader.fields.values():
        if not entry.name.startswith("GGUF."):  # added by the reader
            kind, element_kind = int(entry.types[0]), int(entry.types[-1])
            parts.entries.append(Entry(entry.name.encode(), kind, _as_bytes(entry.contents()), element_kind))
    for tensor in reader.tensors:
        offset = int(tensor.data_offset) - reader.data_offset
        shape = [int(n) for n in tensor.shape]
        parts.tensors.append(Tensor(tensor.name.encode(), shape, int(tensor.tensor_type), offset))
    return parts


def _as_bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_bytes(each) for each in value]
    return value.encode() if isinstance(value, str) else value


def put_together(parts: Parts, alignment: int = 32) -> bytes:
    """Return the bytes of a file, even if its parts are wrong."""
    out = bytearray(b"GGUF")
    n_tensors, n_entries = (
        len(parts.tensors) + parts.n_more_tensors,
        len(parts.entries) + parts.n_more_entries,
    )
    out += struct.pack("<IQQ", parts.version & 0xFFFFFFFF, n_tensors % 2**64, n_entries % 2**64)
    for entry in parts.entries:
        out += _string(entry.key) + struct.pack("<I", entry.kind & 0xFFFFFFFF)
        if entry.kind == ARRAY and isinstance(entry.value, list):
            out += struct.pack("<IQ", entry.element_kind, len(entry.value))
            out += b"".join(_packed(entry.element_kind, value) for value in entry.value)
        else:
            out += _packed(entry.kind, entry.value)
    for tensor in parts.tensors:
        out += _string(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += b"".join(struct.pack("<Q", n % 2**64) for n in tensor.shape)
        out += struct.pack("<IQ", tensor.kind & 0xFFFFFFFF, tensor.offset % 2**64)
    return bytes(out) + bytes(-len(out) % alignment) + parts.data


def _string(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _packed(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value if isinstance(value, bytes) else str(value).encode())
    code = _SCALARS.get(kind)
    if code is None:
        return b"\0" * 8
    if isinstance(value, bytes | list):
        value = len(value)
    if code in "fd":
        try:
            return struct.pack("<" + code, float(value))
        except OverflowError:
            return struct.pack("<" + code, math.inf)
    number: int = int(value) if math.isfinite(value) else 0
    size = struct.calcsize("<" + code)
    return (number % (1 << 8 * size)).to_bytes(size, "little")


# Kinds of damage: each function changes the parts at random.


def _scalar(parts: Parts, rng: random.Random) -> None:
    entries = [entry for entry in parts.entries if entry.kind not in (STRING, ARRAY)]
    if entries:
        entry = rng.choice(entries)
        entry.value = rng.choice(_FLOATS if entry.kind in (6, 12) else _INTEGERS)


def _text(parts: Parts, rng: random.Random) -> None:
    entries = [entry for entry in parts.entries if entry.kind == STRING]
    if entries:
        rng.choice(entries).value = rng.choice(_STRINGS)


def _kind(parts: Parts, rng: random.Random) -> None:
    parts.entry(rng).kind = rng.choice([*range(14), 2**31])


def _remove(parts: Parts, rng: random.Random) -> None:
    parts.entries.remove(parts.entry(rng))


def _double(parts: Parts, rng: random.Random) -> None:
    entry = parts.entry(rng)
    parts.entries.append(Entry(entry.key, entry.kind, entry.value, entry.element_kind))


def _rename(parts: Parts, rng: random.Random) -> None:
    parts.entry(rng).key = rng.choice((b"", b"x" * 70, b"\xff", parts.entry(rng).key))


def _add(parts: Parts, rng: random.Random) -> None:
    architecture = next((e.value for e in parts.entries if e.key == b"general.architecture"), b"")
    name = architecture.decode(errors="replace")[:50] if isinstance(architecture, bytes) else ""
    key = rng.choice(_ADDED).replace("{a}", name).encode()
    kind = rng.choice((4, 4, 4, 6, 7, STRING, 5, 10))
    value: Any = rng.choice(_INTEGERS)
    if kind in (6, STRING):
        value = rng.choice(_FLOATS) if kind == 6 else rng.choice(_STRINGS)
    parts.entries = [entry for entry in parts.entries if entry.key != key] + [Entry(key, kind, value)]


def _array(parts: Parts, rng: random.Random) -> None:
    entries = [entry for entry in parts.entries if entry.kind == ARRAY and entry.value]
    if not entries:
        return
    entry = rng.choice(entries)
    values, at = list(entry.value), rng.randrange(len(entry.value))
    how = rng.randrange(8)
    if how == 0:
        values = values[: rng.choice((0, 1, 2, len(values) // 2, len(values) - 1))]
    elif how == 1:
        values += values[: rng.choice((1, 3, len(values)))]
    elif how == 2:
        values[at] = values[rng.randrange(len(values))]
    elif how == 3:
        values = [values[0]] * len(values)
    elif how == 4:
        rng.shuffle(values)
    elif entry.element_kind == STRING:
        values[at] = rng.choice(_STRINGS)
    elif how == 5:
        values = [rng.choice(_INTEGERS)] * len(values)
    elif how == 6:
        entry.element_kind = rng.choice((*range(13), 99))
    else:
        values[at] = rng.choice(_FLOATS if entry.element_kind in (6, 12) else _INTEGERS)
    entry.value = values


def _counts(parts: Parts, rng: random.Random) -> None:
    more = rng.choice((-1, 1, 2**31, 2**62, -(2**63)))
    if rng.random() < 0.5:
        parts.n_more_entries = more
    else:
        parts.n_more_tensors = more


def _tensor(parts: Parts, rng: random.Random) -> None:
    if not parts.tensors:
        return
    tensor, how = rng.choice(parts.tensors), rng.randrange(8)
    if how == 0:
        tensor.shape[rng.randrange(len(tensor.shape))] = rng.choice(_INTEGERS)
    elif how == 1:
        tensor.shape = tensor.shape[::-1]
    elif how == 2:
        tensor.shape = (tensor.shape * 5)[: rng.choice((0, 1, 2, 3, 4, 5, 9))]
    elif how == 3:
        tensor.kind = rng.choice((*range(42), 2**31))
    elif how == 4:
        tensor.offset = rng.choice((1, 31, 32, 2**31, 2**63, 2**64 - 32, rng.choice(parts.tensors).offset))
    elif how == 5:
        tensor.name = rng.choice((b"", b"\xff", b"x" * 100, rng.choice(parts.tensors).name))
    elif how == 6:
        parts.tensors.remove(tensor)
    else:
        parts.tensors.append(Tensor(tensor.name, tensor.shape, tensor.kind, tensor.offset))


def _weights(parts: Parts, rng: random.Random) -> None:
    """Overwrite weights with NaN, infinity, huge numbers or noise."""
    data = bytearray(parts.data)
    n = min(len(data), rng.choice((4, 64, 4096)))
    at = rng.randrange(max(1, len(data) - n)) // 4 * 4
    pattern = rng.choice((struct.pack("<f", math.nan), struct.pack("<f", math.inf), b"\xff", b"\x7f"))
    fill = rng.randbytes(n) if rng.random() < 0.4 else (pattern * n)[:n]
    data[at : at + n] = fill
    parts.data = bytes(data)


_DAMAGE: tuple[Callable[[Parts, random.Random], None], ...] = (
    _scalar, _scalar, _scalar, _text, _kind, _remove, _double, _rename, _add, _add, _add,
    _array, _array, _array, _counts, _tensor, _tensor, _weights,
)  # fmt: skip


def damaged(path: Path, seed: int) -> tuple[bytes, str]:
    """Return a damaged copy of a sound file, and the names of the kinds of damage."""
    rng = random.Random(seed)
    parts, done = take_apart(path), []
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 3))):
        damage = rng.choice(_DAMAGE)
        damage(parts, rng)
        done.append(damage.__name__.lstrip("_"))
    if rng.random() < 0.02:
        parts.version = rng.choice((0, 1, 2, 4, 2**31))
        done.append("version")
    changed = bytearray(put_together(parts))
    if not done or rng.random() < 0.1:
        done.append(_bytes(changed, len(changed) - len(parts.data), rng))
    return bytes(changed), "+".join(done)


def _bytes(content: bytearray, n_head: int, rng: random.Random) -> str:
    """Damage bytes at random positions; return the name of this kind of damage."""
    how = rng.randrange(4)
    if how == 0:
        del content[rng.randrange(len(content)) :]
        return "cut"
    if how == 1:
        at = rng.randrange(len(content))
        content[at:at] = rng.randbytes(rng.choice((1, 4, 32)))
        return "insert"
    within = n_head if how == 2 else len(content)
    for _ in range(rng.choice((1, 8, 64))):
        at = rng.randrange(max(1, min(within, len(content))))
        content[at] ^= 1 << rng.randrange(8)
    return "flip"


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "bases", nargs=-1, required=True, metavar="SOUND...", type=click.Path(exists=True, path_type=Path)
)
@click.option("--count", default=1000, show_default=True, help="Number of damaged files.")
@click.option("--first", default=0, show_default=True, help="First seed.")
@click.option(
    "--out",
    type=Path,
    default=Path("build/fuzz"),
    show_default=True,
    help="Folder for files that cause faults.",
)
def main(bases: tuple[Path, ...], count: int, first: int, out: Path) -> None:
    """Open the files, one after the other."""
    out.mkdir(parents=True, exist_ok=True)
    path, details, faults = out / "damaged.gguf", Counter[str](), Counter[str]()
    with ExitStack() as workers:
        worker = workers.enter_context(Worker())
        for seed in range(first, first + count):
            content, how = damaged(bases[seed % len(bases)], seed)
            path.write_bytes(content)
            outcome, detail = worker.open(path)
            details[f"{outcome}: {(detail.splitlines() or [''])[-1]}"] += 1
            if outcome in FAULTS:
                faults[outcome] += 1
                path.rename(out / f"{outcome}-{seed}.gguf")
                click.echo(f"seed {seed}, {how}: {outcome}: {detail}", err=True)
            if outcome in ("crash", "hang"):
                worker = workers.enter_context(Worker())
    for line, n in details.most_common(40):
        click.echo(f"{n:6}  {line[:150]}")
    click.echo(json.dumps({"files": count, "faults": {kind: faults[kind] for kind in FAULTS}}))
    sys.exit(bool(faults))


class Worker:
    """A process that opens files. It ends with its context, or if a file crashes it."""

    def __enter__(self) -> Worker:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, its_pipe = spawn.Pipe()
        self.process = spawn.Process(target=_work, args=(its_pipe,), daemon=True)
        self.process.start()
        its_pipe.close()  # otherwise this process would not notice the worker's end
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def open(self, path: Path) -> tuple[str, str]:
        """Open and use a file in the worker; return the outcome and a detail in one line."""
        try:
            self._pipe.send(path)
            if not self._pipe.poll(HANG_SECONDS):
                self.process.kill()
                return "hang", f"no answer for {HANG_SECONDS:.0f} s"
            outcome, detail = self._pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return "crash", f"exit code {self.process.exitcode}"
        return outcome, detail


def _work(pipe: Connection) -> None:
    while True:
        path = pipe.recv()
        memory = peak_bytes()
        outcome, detail = open_one(path)
        pipe.send(("growth", "") if peak_bytes() - memory > MAX_GROWTH else (outcome, detail))


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def open_one(path: Path) -> tuple[str, str]:
    """Open and use a file; return the outcome and a detail."""
    options = ModelOptions(threads=1, gpu_layers=0)
    try:
        with open_pair(path, path, target_options=options, draft_options=options) as pair:
            pair.stream("def f(x):", seed=1, max_tokens=8, policy=FixedLength(2)).run()
    except LlamaspecError as error:
        message = str(error)
        if "\n" in message or "; " not in message:
            return "message", message
        shape = re.sub(r"\d+", "N", message.replace(str(path), "FILE"))  # counted together
        return type(error).__name__, shape[:160]
    except Exception:  # noqa: BLE001 - any other error is a fault
        return "traceback", traceback.format_exc()
    return "works", ""


if __name__ == "__main__":
    main()
