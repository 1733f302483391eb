"""Measure plain decoding, fixed lengths, a simple policy and automatic length on the same prompts, in turns.

\b
    python scripts/bench.py                                   # the embedded pair
    python scripts/bench.py --target big.gguf --draft small.gguf --llama-cpp path/to/build/bin
    python scripts/bench.py --target mtp.gguf --draft auto --llama-cpp path/to/build/bin    # its own heads
    python scripts/bench.py --against ../before               # a worktree of an earlier commit

The physics: a memory-bound target costs about the same for one position as for a few, so draft tokens
that are accepted are nearly free. Arms are interleaved in one process, prompt by prompt, because machines
drift; every figure is a ratio to plain decoding in the same turn: "before" and "now" to that of "now", all
others to "plain". Texts are compared before speeds.
A table goes to stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import click
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench_peers import BEFORE, NOW, Checkouts, LlamaCpp
from foresight import bound_seconds
from llamaspec import (
    Completion,
    FixedLength,
    ModelOptions,
    NoDrafter,
    Pair,
    Sampling,
    demo_draft,
    demo_target,
    open_pair,
)
from llamaspec.length.policy import AutoLength
from llamaspec.llama.options import CACHE_TYPES, DRAFT_SCORED, FLASH_ATTENTION
from llamaspec.measure.store import auto_length, stored_prior
from llamaspec.protocols import LengthPolicy
from simple_length import SimpleLength

PROMPTS = Path(__file__).with_name("prompts.yaml")
FIXED_LENGTHS = (1, 2, 3, 4, 6, 8)
BOUND = "bound: all drafts known"
HINDSIGHT = {"best fixed K per prompt": ("K=", "plain"), "llama.cpp's best per prompt": ("llama.cpp",)}


@dataclass(frozen=True, slots=True)
class Run:
    """One text of one arm."""

    arm: str
    prompt: int
    temperature: float
    turn: int
    n_tokens: int
    tokens_per_second: float
    same_text: bool | None  # as plain decoding in the same turn; None where the arm promises no such thing
    acceptance_rate: float | None = None
    overhead_share: float | None = None  # controller time / decode time


@dataclass(frozen=True, slots=True)
class Score:
    """One arm at one temperature, as ratios to plain decoding."""

    arm: str
    temperature: float
    geometric_mean: float
    spread: float  # factor: exp of the standard deviation of log ratios over prompts
    worst: float
    worst_prompt: int
    same_text: bool | None
    acceptance_rate: float | None  # mean over prompts
    overhead_share: float | None
    per_prompt: dict[int, float] = field(default_factory=dict)


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=Path, default=demo_target(), show_default="the embedded pair")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    default=(str(demo_draft()),),
    show_default="the embedded pair",
    help="A file, auto or mtp. Of several, each drafts for the one before it.",
)
@click.option("--ngram", is_flag=True, help="Earlier text is copied before the draft is asked.")
@click.option("--prompts", type=Path, default=PROMPTS, show_default="scripts/prompts.yaml")
@click.option("--max-prompts", type=int, help="Only the first of them.")
@click.option("--max-tokens", "-n", type=int, default=128, show_default=True)
@click.option("--temperature", "-t", "temperatures", type=float, multiple=True, default=(0.0, 0.8, 1.0))
@click.option("--turns", "-r", type=int, default=1, show_default=True, help="Runs of each arm and prompt.")
@click.option("--length", "-k", "lengths", type=int, multiple=True, default=FIXED_LENGTHS, show_default=True)
@click.option("--depth", type=int, help="Behind so many tokens of text, other prompts in turn.")
@click.option("--flash-attn", type=click.Choice(list(FLASH_ATTENTION)))
@click.option("--cache-type-k", type=click.Choice(list(CACHE_TYPES)), default="f16", show_default=True)
@click.option("--cache-type-v", type=click.Choice(list(CACHE_TYPES)), default="f16", show_default=True)
@click.option("--threads", type=int)
@click.option("--llama-cpp", type=Path, metavar="DIR", help="Also llama.cpp's own tools, from this folder.")
@click.option(
    "--against", type=Path, metavar="DIR", help="Also another checkout of llamaspec, in this folder."
)
def main(
    target: Path,
    drafts: tuple[str, ...],
    ngram: bool,
    prompts: Path,
    max_prompts: int | None,
    max_tokens: int,
    temperatures: tuple[float, ...],
    turns: int,
    lengths: tuple[int, ...],
    depth: int | None,
    flash_attn: str | None,
    cache_type_k: str,
    cache_type_v: str,
    threads: int | None,
    llama_cpp: Path | None,
    against: Path | None,
) -> None:
    """Measure the arms and print how they compare."""
    texts = [entry["text"] for entry in yaml.safe_load(prompts.read_text())][:max_prompts]
    options = ModelOptions(
        threads=threads,
        n_ctx=depth + max_tokens + 64 if depth else None,
        flash_attention=flash_attn,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
    )
    runs: list[Run] = []
    with (
        open_pair(
            target,
            drafts,
            ngram=ngram,
            target_options=options,
            draft_options=replace(options, max_scored=DRAFT_SCORED),
        ) as pair,
        ExitStack() as stack,
    ):
        if depth:
            texts = [_deep(pair, texts, i, depth) for i in range(len(texts))]
        peers: list[LlamaCpp | Checkouts] = [LlamaCpp(llama_cpp, pair, threads)] if llama_cpp else []
        if against is not None:
            peers.append(stack.enter_context(Checkouts(against, pair)))
        arms = _arms(pair, lengths)
        cases = list(itertools.product(temperatures, range(len(texts)), range(turns)))
        _run(pair, FixedLength(0), texts[0], 0.0, 0, 16)  # warm-up
        console = Console(file=sys.stderr)
        for case in track(
            cases, "measuring", console=console, transient=True, disable=not console.is_terminal
        ):
            temperature, prompt, turn = case
            runs += _turn(pair, arms, texts[prompt], case, max_tokens)
            for peer in peers:
                runs += [
                    Run(run.arm, prompt, temperature, turn, *run[1:3], None, run.acceptance_rate)
                    for run in peer.turn(texts[prompt], temperature, turn, max_tokens)
                ]
        attention = f"flash attention {pair.target.flash_attention}, {cache_type_k}, {cache_type_v}"
        description = f"{pair.target.description}, {depth} deep" if depth else pair.target.description
    scores = list(_scores(runs))
    _show(scores, description)
    print(json.dumps({
        "target": str(target), "description": description, "max_tokens": max_tokens, "turns": turns,
        "scores": [asdict(score) for score in scores],
        "runs": [asdict(run) for run in runs],
        "depth": depth, "attention": attention,
    }))  # fmt: skip


def _deep(pair: Pair, texts: list[str], i: int, depth: int) -> str:
    """A prompt behind others: about so many tokens in all."""
    vocabulary, text = pair.target.vocabulary, texts[i]
    others = itertools.cycle([*texts[:i], *texts[i + 1 :]] or texts)
    while len(tokens := vocabulary.tokenize(text.encode())) < depth:
        text = f"{next(others)}\n\n{text}"
    return b"".join(map(vocabulary.piece, tokens[-depth:].tolist())).decode(errors="ignore")


def _arms(pair: Pair, lengths: tuple[int, ...]) -> dict[str, Callable[[], LengthPolicy]]:
    """Every arm with what makes its policy afresh."""
    arms: dict[str, Callable[[], LengthPolicy]] = {"plain": lambda: FixedLength(0)}
    for k in lengths:
        arms[f"K={k}"] = lambda k=k: FixedLength(k)  # type: ignore[misc]
    kept, trees = (AutoLength(sources=pair.sources, trees=each) for each in (False, True))
    arms["auto, kept"] = lambda: kept  # what a chat does: it learns from text to text
    arms["auto, trees, kept"] = lambda: trees
    arms["auto, cold"] = lambda: AutoLength(sources=pair.sources)
    if stored_prior(pair).value is not None:  # a probe's, or what earlier runs have learnt
        arms["auto"] = lambda: auto_length(pair)
    arms["simple"] = SimpleLength
    return arms


def _turn(
    pair: Pair,
    arms: dict[str, Callable[[], LengthPolicy]],
    text: str,
    case: tuple[float, int, int],
    max_tokens: int,
) -> Iterator[Run]:
    """Every arm once, in an order that rotates from turn to turn."""
    temperature, prompt, turn = case
    shift = (prompt + turn) % len(arms)
    order = [*list(arms)[shift:], *list(arms)[:shift]]
    done: dict[str, tuple[Completion, LengthPolicy]] = {}
    for name in order:
        policy = arms[name]()
        done[name] = _run(pair, policy, text, temperature, turn, max_tokens), policy
    plain = done["plain"][0]
    for name, (completion, _) in done.items():
        summary = completion.summary
        yield Run(
            name,
            prompt,
            temperature,
            turn,
            summary.n_tokens,
            summary.tokens_per_second or math.nan,
            completion.tokens == plain.tokens,
            summary.acceptance_rate,
            summary.overhead_seconds / summary.decode_seconds,
        )
    fixed = {policy.n_draft: run for run, policy in done.values() if isinstance(policy, FixedLength)}
    if len(plain.tokens):
        seconds = bound_seconds(fixed[max(fixed)].rounds, [run.rounds for run, _ in done.values()])
        yield Run(BOUND, prompt, temperature, turn, len(plain.tokens), len(plain.tokens) / seconds, None)


def _run(pair: Pair, policy: LengthPolicy, text: str, temperature: float, seed: int, n: int) -> Completion:
    pair.forget()
    drafter = NoDrafter() if isinstance(policy, FixedLength) and policy.n_draft == 0 else None
    sampling = Sampling(temperature=temperature)
    stream = pair.stream(text, sampling=sampling, seed=seed, max_tokens=n, policy=policy, drafter=drafter)
    return stream.run()


def _scores(runs: list[Run]) -> Iterator[Score]:
    speeds = {
        (run.arm, run.temperature, run.prompt, run.turn): run.tokens_per_second
        for run in runs
        if run.arm in {"plain", f"{NOW}: plain"}
    }
    keys = sorted(dict.fromkeys((run.temperature, run.arm) for run in runs), key=lambda key: key[0])
    for temperature, arm in keys:
        own = [run for run in runs if (run.temperature, run.arm) == (temperature, arm)]
        plain = f"{NOW}: plain" if arm.startswith((BEFORE, NOW)) else "plain"
        ratios: dict[int, float] = {}
        for prompt in sorted({run.prompt for run in own}):
            ratios[prompt] = statistics.median(
                run.tokens_per_second / speeds[plain, temperature, prompt, run.turn]
                for run in own
                if run.prompt == prompt
            )
        yield _score(arm, temperature, own, ratios)


def _score(arm: str, temperature: float, own: list[Run], ratios: dict[int, float]) -> Score:
    logs = [math.log(ratio) for ratio in ratios.values()]
    worst_prompt = min(ratios, key=lambda prompt: ratios[prompt])
    shares = [run.overhead_share for run in own if run.overhead_share is not None]
    same = [run.same_text for run in own if run.same_text is not None]
    rates = [run.acceptance_rate for run in own if run.acceptance_rate is not None]
    return Score(
        arm=arm,
        temperature=temperature,
        geometric_mean=math.exp(statistics.mean(logs)),
        spread=math.exp(statistics.stdev(logs)) if len(logs) > 1 else 1.0,
        worst=ratios[worst_prompt],
        worst_prompt=worst_prompt,
        same_text=all(same) if same else None,
        acceptance_rate=statistics.mean(rates) if rates else None,
        overhead_share=statistics.median(shares) if shares else None,
        per_prompt=ratios,
    )


def _show(scores: list[Score], description: str) -> None:
    table = Table(box=None, pad_edge=False, title=f"{description}: speed relative to plain decoding")
    titles = (
        "temperature",
        "arm",
        "geometric mean",
        "spread",
        "worst prompt",
        "same text",
        "accepted",
        "overhead",
    )
    for title in titles:
        table.add_column(title, justify="left" if title == "arm" else "right")
    for score in scores:
        table.add_row(
            f"{score.temperature:g}",
            score.arm,
            f"{score.geometric_mean:.3f}",
            f"×/÷ {score.spread:.2f}",
            f"{score.worst:.2f} (#{score.worst_prompt})",
            {True: "yes", False: "NO", None: "-"}[score.same_text],
            f"{score.acceptance_rate:.0%}" if score.acceptance_rate is not None else "-",
            f"{score.overhead_share:.1%}" if score.overhead_share is not None else "-",
        )
    for temperature in dict.fromkeys(score.temperature for score in scores):
        for name, kinds in HINDSIGHT.items():
            best = _best_in_hindsight(scores, temperature, kinds)
            if best is not None:
                table.add_row(f"{temperature:g}", name, f"{best:.3f}")
    Console(file=sys.stderr, width=120).print(table)


def _best_in_hindsight(scores: list[Score], temperature: float, kinds: tuple[str, ...]) -> float | None:
    """Geometric mean of the best arm of these kinds for each prompt; None where there is no such arm."""
    own = [score for score in scores if score.temperature == temperature]
    fixed = [score for score in own if score.arm.startswith(kinds)]
    if not fixed:
        return None
    prompts = fixed[0].per_prompt
    return math.exp(
        statistics.mean(math.log(max(score.per_prompt[prompt] for score in fixed)) for prompt in prompts)
    )


if __name__ == "__main__":
    main()
