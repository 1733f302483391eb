"""What a draft of a draft gains on real models: each draft alone, and all of them, in turns.

    python scripts/measure_stages.py --target big.gguf --draft middle.gguf --draft small.gguf
    python scripts/measure_stages.py --target big.gguf --draft middle.gguf --draft small.gguf -t 0 -n 32 -r 8

Every arm has automatic length, learnt from text to text. All share the loaded models and take turns in one
process, in an order that rotates; a speed is a ratio to plain decoding in the same turn, and the median over
turns. Beside other work `--threads 1 --cpu-time` counts what the processor did for this process. What a model
costs is the time in which it writes alone; how often a draft agrees is counted along what others wrote.
A table goes to stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path

import click
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from bench import PROMPTS
from help_text import help_text
from llamaspec import Completion, ModelOptions, Pair, Sampling, open_pair
from llamaspec.draft_making.worth import WrittenText, read_along
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import DRAFT_SCORED

PLAIN, ALL = "plain", "all"


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt, continued by every arm, and by every draft alone."""

    temperature: float
    prompt: int
    rates: dict[str, float]  # tokens per second of each arm
    costs: dict[str, float]  # seconds of a token of each draft, next to the target's
    agreements: dict[str, float]  # "draft, by whom": the share of tokens that it would have drawn, too
    same_text: bool  # every arm has said what plain decoding says


@dataclass(frozen=True, slots=True)
class Score:
    """What the turns of one temperature say."""

    temperature: float
    ratios: dict[str, float]  # geometric mean over prompts of each arm's median ratio to plain decoding
    best: str  # of the arms with one draft, or with none
    stages: tuple[float, float, float]  # all drafts next to the best of these in the same turn: quartiles
    costs: dict[str, float]
    agreements: dict[str, float]
    same_text: bool


def score(turns: Sequence[Turn]) -> Score:
    """Fold the turns of one temperature."""
    ratios = {}
    for arm in turns[0].rates:
        medians = [
            statistics.median(turn.rates[arm] / turn.rates[PLAIN] for turn in turns if turn.prompt == prompt)
            for prompt in sorted({turn.prompt for turn in turns})
        ]
        ratios[arm] = exp(statistics.mean(map(log, medians)))
    best = max((arm for arm in ratios if arm != ALL), key=ratios.__getitem__)
    gains = np.quantile([turn.rates[ALL] / turn.rates[best] for turn in turns], [0.25, 0.5, 0.75])
    return Score(
        turns[0].temperature,
        ratios,
        best,
        tuple(gains.tolist()),
        _medians(turn.costs for turn in turns),
        {
            who: statistics.mean(turn.agreements[who] for turn in turns if who in turn.agreements)
            for who in turns[0].agreements
        },
        all(turn.same_text for turn in turns),
    )


def _medians(found: Iterable[dict[str, float]]) -> dict[str, float]:
    each = list(found)
    return {name: statistics.median(values[name] for values in each) for name in each[0]}


class Arms:
    """The ways to draft for one target, over the same models; what they learn is their own."""

    def __init__(self, models: Sequence[LlamaModel], clock: Callable[[], float]) -> None:
        target, *drafts = models
        self.drafts = {f"draft {i + 1}": draft for i, draft in enumerate(drafts)}
        self.pairs = {PLAIN: Pair(target, None, 0.0, clock=clock)}
        for name, draft in self.drafts.items():
            self.pairs[name] = Pair(target, draft, 0.0, clock=clock)
        self.pairs[ALL] = Pair(target, drafts[0], 0.0, stages=drafts[1:], clock=clock)
        self.alone = {name: Pair(draft, None, 0.0, clock=clock) for name, draft in self.drafts.items()}

    def turn(self, text: str, prompt: int, sampling: Sampling, seed: int, max_tokens: int) -> Turn:
        """Let every arm write, in an order that rotates."""

        def write(pair: Pair) -> Completion:
            pair.forget()
            return pair.stream(text, sampling=sampling, seed=seed, max_tokens=max_tokens).run()

        names = list(self.pairs)
        shift = (prompt + seed) % len(names)
        done = {name: write(self.pairs[name]) for name in [*names[shift:], *names[:shift]]}
        alone = {PLAIN: done[PLAIN]} | {name: write(pair) for name, pair in self.alone.items()}
        writers = [PLAIN, *self.drafts]
        pairs = [(name, PLAIN) for name in self.drafts] + list(zip(writers[2:], writers[1:], strict=False))
        agreements = {}
        for name, writer in pairs:
            if alone[writer].tokens:
                written = _written(self.pairs[PLAIN].target, text, alone[writer])
                agreed = read_along(self.drafts[name], written, sampling, seed)
                agreements[_named(name, writer)] = float(agreed.mean())
        rates = {name: done[name].summary.tokens_per_second or 0.0 for name in names}
        return Turn(
            sampling.temperature,
            prompt,
            rates,
            {
                name: rates[PLAIN] / (each.summary.tokens_per_second or 0.0)
                for name, each in alone.items()
                if name != PLAIN
            },
            agreements,
            all(each.tokens == done[PLAIN].tokens for each in done.values()),
        )


def _named(draft: str, writer: str) -> str:
    return f"{draft}, by {'the target' if writer == PLAIN else writer}"


def _written(target: LlamaModel, text: str, completion: Completion) -> WrittenText:
    prompt = target.vocabulary.tokenize(text.encode())
    tokens = np.concatenate([prompt, np.array(completion.tokens, dtype=np.int32)])
    return WrittenText(tokens, len(prompt))


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=Path, required=True)
@click.option("--draft", "drafts", type=Path, multiple=True, required=True, help="Two or more, in order.")
@click.option("--max-prompts", type=int, help="Only the first of scripts/prompts.yaml.")
@click.option("--max-tokens", "-n", type=int, default=48, show_default=True)
@click.option("--temperature", "-t", "temperatures", type=float, multiple=True, default=(0.0, 0.8, 1.0))
@click.option("--turns", "-r", type=int, default=3, show_default=True, help="Of each prompt.")
@click.option("--threads", type=int)
@click.option("--cpu-time", is_flag=True, help="Count processor time: of one thread, beside other work.")
def main(
    target: Path,
    drafts: tuple[Path, ...],
    max_prompts: int | None,
    max_tokens: int,
    temperatures: tuple[float, ...],
    turns: int,
    threads: int | None,
    cpu_time: bool,
) -> None:
    """Measure the arms and print how they compare."""
    if len(drafts) < 2:
        raise click.UsageError("a draft of a draft needs two drafts; give --draft twice")
    if cpu_time and threads != 1:
        raise click.UsageError("--cpu-time adds up all threads; give --threads 1 with it")
    texts = [entry["text"] for entry in yaml.safe_load(PROMPTS.read_text())][:max_prompts]
    options = ModelOptions(threads=threads, n_ctx=1024)
    small = ModelOptions(threads=threads, n_ctx=1024, max_scored=DRAFT_SCORED)
    clock = time.process_time if cpu_time else time.perf_counter
    found: list[Turn] = []
    with open_pair(target, drafts, target_options=options, draft_options=small) as pair:
        for temperature in temperatures:
            arms = Arms([pair.target, *pair.draft_models], clock)
            sampling = Sampling(temperature=temperature)
            arms.turn(texts[0], 0, sampling, 0, max_tokens)  # warm-up
            for seed, (prompt, text) in itertools.product(range(1, turns + 1), enumerate(texts)):
                found.append(arms.turn(text, prompt, sampling, seed, max_tokens))
    scores = [score([turn for turn in found if turn.temperature == t]) for t in dict.fromkeys(temperatures)]
    _show(scores)
    print(json.dumps({
        "target": str(target), "drafts": [str(draft) for draft in drafts], "max_tokens": max_tokens,
        "scores": [asdict(each) for each in scores], "turns": [asdict(turn) for turn in found],
    }))  # fmt: skip


def _show(scores: Sequence[Score]) -> None:
    table = Table(box=None, pad_edge=False, title="speed relative to plain decoding")
    for title in ("temperature", *scores[0].ratios, "all / best with one", "same text"):
        table.add_column(title, justify="right")
    for each in scores:
        low, median, high = each.stages
        table.add_row(
            f"{each.temperature:g}",
            *(f"{ratio:.3f}" for ratio in each.ratios.values()),
            f"{median:.3f} ({low:.3f}-{high:.3f}), {each.best}",
            "yes" if each.same_text else "NO",
        )
    Console(file=sys.stderr, width=120).print(table)
    for each in scores:
        for title, values in (("a token costs", each.costs), ("agrees", each.agreements)):
            told = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
            print(f"t = {each.temperature:g}, {title}: {told}", file=sys.stderr)


if __name__ == "__main__":
    main()
