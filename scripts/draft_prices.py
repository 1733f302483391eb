"""Print what drafts cost and how often they are right: seconds per draft token, beside a token of the target.

\b
    python scripts/draft_prices.py big.gguf small.gguf eagle3.gguf
    python scripts/draft_prices.py big.gguf --random eagle3 --random dflash:5 --draft-length 7

Each draft drafts for the same prompts, in turns with plain decoding. A price includes everything that the
draft evaluates for a round: also the tokens that were accepted in the round before. Acceptance is the
accepted share of the tokens that the target verified. `--random` draws the weights of a draft of realistic
size: its price is right, its acceptance means nothing. Nothing else should run on the machine. The prompts
are from Python's standard library, unless `--text` gives others. The last line has the table as JSON.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from gguf_writing import copy_vocabulary, write_gguf
from llamaspec import FixedLength, LlamaspecError, ModelOptions, NoDrafter, Pair, Sampling, open_pair
from llamaspec.llama.gguf_file import GgufFile, read_gguf
from llamaspec.values import Round, Rows, TokenArray

MODULES = ("configparser", "csv", "heapq", "queue", "shutil", "statistics", "string", "textwrap")
PROMPT = 64  # tokens
BLOCK = 16  # positions of a random draft that computes a block at once
TEMPERATURES = (0.0, 0.8)
KINDS = {kind.name.lower(): kind for kind in (
    GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0,
)}  # fmt: skip


@dataclass(frozen=True)
class Price:
    """What a draft costs for a target."""

    draft: str
    draft_length: int  # tokens of a draft
    target_seconds: float  # of a token by plain decoding
    seconds: float  # of a draft
    acceptance: dict[str, float | None]  # by temperature

    @property
    def line(self) -> str:
        """A row of the table."""
        token = self.seconds / self.draft_length
        accepted = (f"{each:8.2f}" if each is not None else f"{'-':>8}" for each in self.acceptance.values())
        return (
            f"{self.draft:32.32} {self.draft_length:6} {1e3 * self.seconds:9.2f} {1e3 * token:9.2f} "
            f"{1e3 * self.target_seconds:9.2f} {token / self.target_seconds:7.3f} {' '.join(accepted)}"
        )


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("drafts", nargs=-1)
@click.option("--random", "wanted", multiple=True, metavar="KIND[:LAYERS]", help="eagle3, or dflash:5.")
@click.option("--type", "kind", type=click.Choice(list(KINDS)), default="q8_0", help="Of random weights.")
@click.option("--draft-length", "-k", type=click.IntRange(1, BLOCK - 1), default=3, show_default=True)
@click.option("--max-tokens", "-n", type=click.IntRange(2), default=48, show_default=True)
@click.option("--text", "texts", type=click.Path(exists=True, path_type=Path), multiple=True)
@click.option("--threads", type=click.IntRange(1), help="Default: chosen by the load of the machine.")
def main(
    target: Path,
    drafts: Sequence[str],
    wanted: Sequence[str],
    kind: str,
    draft_length: int,
    max_tokens: int,
    texts: Sequence[Path],
    threads: int | None,
) -> None:
    """Measure and print."""
    options = ModelOptions(n_ctx=PROMPT + max_tokens + BLOCK, threads=threads)
    head = f"{'draft':32} {'tokens':>6} {'ms/draft':>9} {'ms/token':>9} {'target ms':>9} {'ratio':>7}"
    print(head, *(f"{f'T = {each:g}':>8}" for each in TEMPERATURES))
    prices = []
    try:
        with TemporaryDirectory() as folder:
            drawn = [write_random(Path(folder), target, each, KINDS[kind]) for each in wanted]
            for draft in (*drafts, *drawn):
                with open_pair(target, draft, target_options=options, draft_options=options) as pair:
                    prices.append(measured(pair, Path(draft).name, draft_length, max_tokens, texts))
                print(prices[-1].line, flush=True)
    except (LlamaspecError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    print(json.dumps([asdict(price) for price in prices]))


def measured(pair: Pair, name: str, n_draft: int, n: int, texts: Sequence[Path]) -> Price:
    """Complete all prompts plainly and with drafts, in turns."""
    prompts, plain, drafting = list(prompts_of(pair, texts)), list[Round](), list[Round]()
    acceptance = dict[str, float | None]()
    for temperature in TEMPERATURES:
        rounds = list[Round]()
        for seed, prompt in enumerate(prompts):
            sampling = Sampling(temperature=temperature)
            for found, how in ((plain, {"drafter": NoDrafter()}), (rounds, {"policy": FixedLength(n_draft)})):
                pair.forget()
                stream = pair.stream(prompt, sampling=sampling, seed=seed, max_tokens=n, **how)
                found += stream.run().rounds[1:]  # the first round of a draft may process the prompt
        whole = [round_ for round_ in rounds if round_.n_drafted == n_draft]
        n_verified = sum(round_.n_verified for round_ in whole)
        n_accepted = sum(round_.n_accepted for round_ in whole)
        acceptance[f"{temperature:g}"] = n_accepted / n_verified if n_verified else None
        drafting += whole
    if not drafting:
        raise ValueError(f"{name} never drafts {n_draft} tokens; choose a smaller --draft-length")
    target_seconds = median(round_.verify_seconds for round_ in plain)
    return Price(name, n_draft, target_seconds, median(each.draft_seconds for each in drafting), acceptance)


def prompts_of(pair: Pair, texts: Sequence[Path]) -> Iterator[TokenArray]:
    """Yield a piece from the middle of each text."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in texts or [folder / f"{module}.py" for module in MODULES]:
        tokens = pair.target.vocabulary.tokenize(path.read_bytes(), add_special=False)
        middle = max(len(tokens) - PROMPT, 0) // 2
        yield pair.target.vocabulary.begun(tokens[middle : middle + PROMPT])


# Random drafts


def write_random(folder: Path, target: Path, wanted: str, kind: GGMLQuantizationType) -> str:
    """Write a random draft whose layers are as wide as the target's; return its path."""
    architecture, _, given = wanted.partition(":")
    if architecture not in ("eagle3", "dflash") or not (given or "1").isdigit():
        raise ValueError(f"--random must be eagle3 or dflash:LAYERS, got {wanted}")
    is_eagle = architecture == "eagle3"
    n_layers = 1 if is_eagle else int(given or 5)
    found = read_gguf(target)
    n_target = found.number("block_count")
    layers = np.linspace(1, n_target - 2, 3 if is_eagle else 5).astype(int).tolist()
    path = folder / f"random-{architecture}-{n_layers}.gguf"

    def describe(writer: GGUFWriter) -> None:
        sizes = (
            "embedding_length", "feed_forward_length", "context_length", "attention.head_count",
        )  # fmt: skip
        for key in sizes:
            writer.add_uint32(f"{architecture}.{key}", found.number(key))
        _, n_kv_heads, head_size = heads_of(found)
        writer.add_uint32(f"{architecture}.attention.head_count_kv", n_kv_heads)
        for part in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            writer.add_uint32(f"{architecture}.{part}", head_size)
        writer.add_uint32(f"{architecture}.block_count", n_layers)
        writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_array(f"{architecture}.target_layers", layers)
        if is_eagle:
            writer.add_uint32("eagle3.target_hidden_size", found.number("embedding_length"))
        else:
            writer.add_uint32("dflash.block_size", BLOCK)
            writer.add_bool("dflash.attention.causal", False)
        copy_vocabulary(writer, target)
        if not is_eagle:
            writer.add_mask_token_id(2)  # any token: the weights are random

    write_gguf(
        path, architecture, random_tensors(found, n_layers, len(layers), is_eagle=is_eagle), describe, kind
    )
    return str(path)


def heads_of(found: GgufFile) -> tuple[int, int, int]:
    """Return the numbers of heads, of those of keys and values, and the size of one."""
    n_heads = found.number("attention.head_count")
    size = found.number("embedding_length") // n_heads
    return (
        n_heads,
        found.number("attention.head_count_kv", n_heads),
        found.number("attention.key_length", size),
    )


def random_tensors(
    found: GgufFile, n_layers: int, n_rows: int, *, is_eagle: bool
) -> Iterator[tuple[str, Rows]]:
    """Yield the tensors of a draft that borrows embedding and output from its target."""
    rng, width, n_ffn = (
        np.random.default_rng(0),
        found.number("embedding_length"),
        found.number("feed_forward_length"),
    )
    n_heads, n_kv_heads, head_size = heads_of(found)

    def matrix(n_out: int, n_in: int) -> Rows:
        drawn: Rows = rng.standard_normal((n_out, n_in), dtype=np.float32) / np.float32(np.sqrt(n_in))
        return drawn

    yield "fc.weight", matrix(width, n_rows * width)
    norms = {"output_norm": width} if is_eagle else {"output_norm": width, "enc.output_norm": width}
    for layer in range(n_layers):
        block, n_in = f"blk.{layer}", 2 * width if is_eagle else width
        norms |= {f"{block}.attn_norm": width, f"{block}.ffn_norm": width}
        if is_eagle:
            norms[f"{block}.attn_norm_2"] = width
        else:
            norms |= {f"{block}.attn_q_norm": head_size, f"{block}.attn_k_norm": head_size}
        yield f"{block}.attn_q.weight", matrix(n_heads * head_size, n_in)
        yield f"{block}.attn_k.weight", matrix(n_kv_heads * head_size, n_in)
        yield f"{block}.attn_v.weight", matrix(n_kv_heads * head_size, n_in)
        yield f"{block}.attn_output.weight", matrix(width, n_heads * head_size)
        yield f"{block}.ffn_gate.weight", matrix(n_ffn, width)
        yield f"{block}.ffn_up.weight", matrix(n_ffn, width)
        yield f"{block}.ffn_down.weight", matrix(width, n_ffn)
    for name, size in norms.items():
        yield f"{name}.weight", np.ones(size, dtype=np.float32)


if __name__ == "__main__":
    main()
