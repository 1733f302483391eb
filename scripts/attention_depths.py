"""What each way to compute attention costs behind so many tokens of text, and which one llamaspec chooses.

The choice is that of `llamaspec generate` for a prompt of as many tokens, of which it writes 256 more.

    python scripts/widen_gguf.py --kv-factor 4 --layers 10 --quantize Q4_0
    python scripts/attention_depths.py --target build/models/target-x8-kv4-L10-Q4_0.gguf

Every configuration has contexts of its own for the deepest text; they take turns in one process, at every
depth, with plain rounds and with rounds of three draft tokens. A table goes to stderr, all times to stdout.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import yaml
from rich.console import Console
from rich.table import Table

from help_text import help_text
from llamaspec import (
    Completion,
    FixedLength,
    LlamaModel,
    ModelOptions,
    NoDrafter,
    Pair,
    Sampling,
    demo_draft,
    open_pair,
)
from llamaspec.cli.terminal import SlowProgress
from llamaspec.llama.options import DRAFT_SCORED
from llamaspec.measure.attention import CONFIGURATIONS, Configuration
from llamaspec.measure.attention_choice import TextSize
from llamaspec.measure.fitting import fitted
from llamaspec.measure.pair_files import ModelFile
from llamaspec.values import TokenArray

PROMPTS = Path(__file__).with_name("prompts.yaml")
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
N_DRAFT = 3
WRITTEN = 256  # tokens, unless `llamaspec generate` is told otherwise
ROOM = 64  # tokens of context behind the written ones
PIECE = 512  # tokens of the prompt that are read at once
NEVER = -1e9  # added to the score of what ends a text


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one configuration at one depth; medians over turns."""

    configuration: str
    depth: int
    reading: float  # seconds a token of the prompt, from the depth before to this one
    plain: float  # seconds a round without a draft
    drafted: float  # seconds a round with N_DRAFT draft tokens


@dataclass(frozen=True, slots=True)
class Behind:
    """Seconds of the chosen configuration divided by those of the fastest one at this depth."""

    depth: int
    chosen: str  # for a prompt of this depth
    reading: float
    plain: float
    drafted: float


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=FILE, required=True)
@click.option("--draft", type=FILE, default=demo_draft(), show_default="the embedded one")
@click.option(
    "--depth",
    "depths",
    type=click.IntRange(min=2),
    multiple=True,
    default=(64, 450, 1800, 3600, 7200),
    show_default=True,
    help="Tokens; may be repeated.",
)
@click.option(
    "--max-tokens", "-n", type=click.IntRange(min=8), default=24, show_default=True, help="Of each text."
)
@click.option(
    "--turns", "-r", type=click.IntRange(min=1), default=3, show_default=True, help="Of each configuration."
)
@click.option("--threads", type=click.IntRange(min=1))
def main(
    target: Path, draft: Path, depths: tuple[int, ...], max_tokens: int, turns: int, threads: int | None
) -> None:
    """Time every configuration at every depth."""
    depths = tuple(sorted(set(depths)))
    options = ModelOptions(threads=threads, n_ctx=depths[-1] + max(max_tokens, WRITTEN) + ROOM)
    small = replace(options, max_scored=DRAFT_SCORED)
    chosen = {depth: _chosen(target, options, depth) for depth in depths}
    costs: list[Cost] = []
    read = 0
    with SlowProgress("measuring") as progress, ExitStack() as stack:
        pairs = {
            str(one): stack.enter_context(
                open_pair(
                    target,
                    draft,
                    target_options=_computed(options, one),
                    draft_options=_computed(small, one),
                )
            )
            for one in CONFIGURATIONS
        }
        model = next(iter(pairs.values())).target
        description, text = model.description, _long_text(model, depths[-1])
        for done, depth in enumerate(depths):
            costs += _costs(pairs, text, (read, depth), max_tokens, turns)
            progress.part(done + 1, len(depths))
            read = depth
    behind = [_behind([cost for cost in costs if cost.depth == depth], one) for depth, one in chosen.items()]
    _show(costs, behind, description)
    print(json.dumps({
        "target": str(target), "description": description,
        "costs": [asdict(cost) for cost in costs], "behind": [asdict(one) for one in behind],
    }))  # fmt: skip


def _computed(options: ModelOptions, one: Configuration) -> ModelOptions:
    return replace(
        options,
        flash_attention="auto" if one.flash_attention == "on" else "off",
        cache_type_k=one.cache_type_k,
        cache_type_v=one.cache_type_v,
    )


def _chosen(target: Path, options: ModelOptions, depth: int) -> str:
    """What llamaspec takes behind a prompt of this depth; measured once."""
    found = fitted(ModelFile(target, options), is_thorough=True, text=TextSize(depth, WRITTEN))
    if found.fault is not None:
        raise click.ClickException(found.fault)
    return next(str(one) for one in CONFIGURATIONS if _computed(options, one) == found.file.options)


def _long_text(model: LlamaModel, n: int) -> TokenArray:
    texts = itertools.cycle(entry["text"] for entry in yaml.safe_load(PROMPTS.read_text()))
    text = ""
    while len(tokens := model.vocabulary.tokenize(text.encode())) < n:
        text += f"{next(texts)}\n\n"
    return tokens[:n]


def _costs(
    pairs: dict[str, Pair], text: TokenArray, span: tuple[int, int], n: int, turns: int
) -> Iterator[Cost]:
    """At the end of the span; its tokens are read piece by piece, each by every configuration in turn."""
    start, depth = span
    reading = dict.fromkeys(pairs, 0.0)
    for turn, end in enumerate([*range(start + PIECE, depth, PIECE), depth]):
        for name in _rotated(pairs, turn):
            reading[name] += _run(pairs[name], text[:end], 0, 1).prefill_seconds
    taken: dict[tuple[str, int], list[float]] = {}
    for turn, n_draft in itertools.product(range(turns), (0, N_DRAFT)):
        for name in _rotated(pairs, turn):
            rounds = _run(pairs[name], text[:depth], n_draft, n).rounds
            seconds = [one.seconds for one in rounds if len(one.drafted) == n_draft]
            taken.setdefault((name, n_draft), []).append(statistics.median(seconds))
    for name in pairs:
        plain, drafted = (statistics.median(taken[name, n_draft]) for n_draft in (0, N_DRAFT))
        yield Cost(name, depth, reading[name] / (depth - start), plain, drafted)


def _rotated(pairs: dict[str, Pair], turn: int) -> list[str]:
    names = list(pairs)
    shift = turn % len(names)
    return [*names[shift:], *names[:shift]]


def _run(pair: Pair, text: TokenArray, n_draft: int, n: int) -> Completion:
    return pair.stream(
        text,
        sampling=Sampling(temperature=0.0, logit_bias=dict.fromkeys(pair.target.vocabulary.ends, NEVER)),
        max_tokens=n,
        policy=FixedLength(n_draft),
        drafter=None if n_draft else NoDrafter(),
    ).run()


def _behind(costs: list[Cost], chosen: str) -> Behind:
    own = next(cost for cost in costs if cost.configuration == chosen)
    return Behind(
        own.depth,
        chosen,
        own.reading / min(cost.reading for cost in costs),
        own.plain / min(cost.plain for cost in costs),
        own.drafted / min(cost.drafted for cost in costs),
    )


def _show(costs: list[Cost], behind: list[Behind], description: str) -> None:
    table = Table(box=None, pad_edge=False, title=description)
    table.add_column("tokens", justify="right")
    table.add_column("configuration")
    for title in ("ms to read a token", "ms a plain round", f"ms a round of {N_DRAFT}"):
        table.add_column(title, justify="right")
    for one in behind:
        for cost in costs:
            if cost.depth == one.depth:
                times = (cost.reading, cost.plain, cost.drafted)
                table.add_row(str(cost.depth), cost.configuration, *(f"{1e3 * time:.2f}" for time in times))
        ratios = (f"{ratio:.2f}" for ratio in (one.reading, one.plain, one.drafted))
        table.add_row("", f"chosen: {one.chosen}", *ratios, end_section=True)
    Console(file=sys.stderr, width=120).print(table)


if __name__ == "__main__":
    main()
