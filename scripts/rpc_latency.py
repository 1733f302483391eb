"""Measure what drafting gains where the target computes on another machine, at several distances.

    python scripts/rpc_latency.py                                          # the embedded pair
    python scripts/rpc_latency.py --target big.gguf --draft small.gguf --delay 0 --delay 30

A worker of its own on this machine stands behind a proxy that delays each direction. Every evaluation costs
one round trip, whatever its width, so more is drafted as the distance grows. At each distance the pair is
probed, and plain decoding and automatic length take turns, prompt by prompt; texts are compared before
speeds. A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import yaml
from rich.console import Console
from rich.table import Table

from bench import PROMPTS
from help_text import help_text
from llamaspec import ModelOptions, NoDrafter, Pair, Sampling, demo_draft, demo_target, open_pair
from llamaspec.length.policy import AutoLength
from llamaspec.measure.probe import QUICK, measure
from local_worker import running_worker

PROXY = Path(__file__).with_name("delaying_proxy.py")


@dataclass(frozen=True, slots=True)
class Distance:
    """What came of one delay."""

    delay_ms: float  # of each direction
    plain_ms: float  # for a token
    drafted_ms: float  # for a token, with drafts of automatic length
    speedup: float  # median over prompts
    least: float
    greatest: float
    draft_tokens: float  # in a round, on average
    most_draft_tokens: int
    tokens_per_round: float
    same_text: bool


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=Path, default=demo_target(), show_default="the embedded pair")
@click.option("--draft", type=Path, default=demo_draft(), show_default="the embedded pair")
@click.option(
    "--delay", "delays", type=float, multiple=True, default=(0.0, 2.0, 10.0, 30.0), show_default=True
)
@click.option("--max-prompts", type=int, default=4, show_default=True)
@click.option("--max-tokens", "-n", type=int, default=96, show_default=True)
@click.option("--temperature", "-t", type=float, default=0.0, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True, help="Here, and of the worker.")
def main(
    target: Path,
    draft: Path,
    delays: tuple[float, ...],
    max_prompts: int,
    max_tokens: int,
    temperature: float,
    threads: int,
) -> None:
    """Measure each distance, and print how drafting does there."""
    texts = [entry["text"] for entry in yaml.safe_load(PROMPTS.read_text())][:max_prompts]
    sampling = Sampling(temperature=temperature)
    found = []
    with running_worker(threads) as worker:
        for delay in delays:
            with _proxy(worker.address, delay) as near:
                options = ModelOptions(threads=threads, n_ctx=1024, workers=(near,))
                here = ModelOptions(threads=threads, n_ctx=1024)
                with open_pair(target, draft, target_options=options, draft_options=here) as pair:
                    description = pair.target.description
                    found.append(_distance(pair, delay, texts, sampling, max_tokens))
    _show(found, description)
    print(json.dumps({
        "target": str(target), "draft": str(draft), "description": description, "max_tokens": max_tokens,
        "temperature": temperature, "distances": [asdict(distance) for distance in found],
    }))  # fmt: skip


def _distance(pair: Pair, delay: float, texts: list[str], sampling: Sampling, max_tokens: int) -> Distance:
    automatic = AutoLength(measure(pair, QUICK).curve, sources=pair.sources)
    plain, drafted, lengths, n_rounds, n_tokens, same = [], [], [], 0, 0, True
    for seed, text in enumerate(texts):
        done = {}
        for policy in (None, automatic) if seed % 2 else (automatic, None):
            pair.forget()
            how = {"drafter": NoDrafter()} if policy is None else {"policy": policy}
            done[policy] = pair.stream(text, sampling=sampling, seed=seed, max_tokens=max_tokens, **how).run()
        alone, both = done[None], done[automatic]
        same = same and alone.tokens == both.tokens
        plain.append(alone.summary.decode_seconds / max(1, alone.summary.n_tokens))
        drafted.append(both.summary.decode_seconds / max(1, both.summary.n_tokens))
        lengths += [len(each.draft.tokens) for each in both.rounds]
        n_rounds, n_tokens = n_rounds + len(both.rounds), n_tokens + both.summary.n_tokens
    ratios = [before / after for before, after in zip(plain, drafted, strict=True)]
    return Distance(
        delay_ms=delay,
        plain_ms=1e3 * statistics.median(plain),
        drafted_ms=1e3 * statistics.median(drafted),
        speedup=statistics.median(ratios),
        least=min(ratios),
        greatest=max(ratios),
        draft_tokens=statistics.mean(lengths) if lengths else math.nan,
        most_draft_tokens=max(lengths, default=0),
        tokens_per_round=n_tokens / max(1, n_rounds),
        same_text=same,
    )


@contextmanager
def _proxy(address: str, delay: float) -> Iterator[str]:
    command = [sys.executable, str(PROXY), address, "--delay", str(delay)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def _show(found: list[Distance], description: str) -> None:
    table = Table(box=None, pad_edge=False, title=f"{description} on a worker, delayed in each direction")
    titles = (
        "delay",
        "plain",
        "drafted",
        "speed-up",
        "from",
        "to",
        "draft tokens",
        "most",
        "per round",
        "same text",
    )
    for title in titles:
        table.add_column(title, justify="right")
    for at in found:
        table.add_row(
            f"{at.delay_ms:g} ms",
            f"{at.plain_ms:.1f} ms",
            f"{at.drafted_ms:.1f} ms",
            f"{at.speedup:.2f}",
            f"{at.least:.2f}",
            f"{at.greatest:.2f}",
            f"{at.draft_tokens:.1f}",
            str(at.most_draft_tokens),
            f"{at.tokens_per_round:.2f}",
            "yes" if at.same_text else "NO",
        )
    Console(stderr=True).print(table)


if __name__ == "__main__":
    main()
