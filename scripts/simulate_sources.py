"""What several sources of draft tokens are worth together: real texts, pretended seconds.

    python scripts/simulate_sources.py                     # the embedded pair
    python scripts/simulate_sources.py --step 0.12 -n 200

Copies from the text, the draft model, and both, each with automatic length, on texts that repeat themselves
and on others. Models compute as always; only the clock is not real, as in scripts/simulate_trees.py. Ratios
to plain decoding. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import click
import yaml

from help_text import help_text
from llamaspec import FixedLength, LlamaModel, Pair, Sampling, demo_draft, demo_target
from llamaspec.cli.compare import PREDICTABLE_PROMPT
from llamaspec.length.auto_length import AutoLength
from similar_edits import NAMES
from simulate_trees import CURVES, PROMPTS, Machine

ARMS = {"copies": (True, False), "model": (False, True), "both": (True, True)}  # (ngram, draft)
FUNCTION = '''
def read_{name}(path, encoding=None):
    """Return all {name} of a file."""
    {name} = []
    with open(path, encoding=encoding) as file:
        for line in file:
            {name}.append(line.strip())
    return {name}

'''


def texts(turns: int = 1) -> dict[str, list[tuple[str, float]]]:
    """Prompts by what they are like, and the temperature of each; so often with another seed."""
    usual = [entry["text"] for entry in yaml.safe_load(PROMPTS.read_text())]
    edited = "".join(FUNCTION.format(name=name) for name in NAMES[:3])
    return {
        "repeats": [(PREDICTABLE_PROMPT, 0.0), (PREDICTABLE_PROMPT, 0.8)] * turns,
        "does not": [("class Stack:", 0.8), ("class Stack:", 0.0)] * turns,
        "repeats with changes": [(f"{edited}\ndef read_{name}(", 0.8) for name in NAMES[3:6]] * turns,
        "usual": [(text, 0.8 * ((i + turn) % 2)) for turn in range(turns) for i, text in enumerate(usual)],
    }


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=Path, default=demo_target(), show_default="the embedded pair")
@click.option("--draft", type=Path, default=demo_draft(), show_default="the embedded pair")
@click.option("--curve", "curves", type=click.Choice(list(CURVES)), multiple=True, default=tuple(CURVES))
@click.option("--text", "kinds", type=click.Choice(list(texts())), multiple=True, default=tuple(texts()))
@click.option("--step", "steps", type=float, multiple=True, default=(0.06, 0.2), show_default=True,
              help="Seconds of a draft step, next to width 1.")  # fmt: skip
@click.option("--max-tokens", "-n", default=96, show_default=True)
@click.option("--turns", "-r", default=1, show_default=True, help="Each text, with other seeds.")
def main(
    target: Path,
    draft: Path,
    curves: tuple[str, ...],
    kinds: tuple[str, ...],
    steps: tuple[float, ...],
    max_tokens: int,
    turns: int,
) -> None:
    """Simulate sources alone and together."""
    found: list[dict[str, Any]] = []
    for curve in curves:
        for step in steps:
            machine = Machine(CURVES[curve], step)
            with machine.models(target, draft) as (big, small):
                for kind in kinds:
                    found.append(_compare(big, small, machine, texts(turns)[kind], max_tokens))
                    found[-1] |= {"curve": curve, "step": step, "text": kind}
                    _show(found[-1])
    print(json.dumps({"max_tokens": max_tokens, "turns": turns, "found": found}))


def _compare(
    big: LlamaModel, small: LlamaModel, machine: Machine, prompts: list[tuple[str, float]], max_tokens: int
) -> dict[str, Any]:
    """Every text in every way: speed next to plain decoding, and draft tokens by source."""
    right, plain = [], []
    pair = Pair(big, small, 0.0, clock=machine)
    for seed, (prompt, temperature) in enumerate(prompts):
        pair.forget()
        how = {"sampling": Sampling(temperature=temperature), "seed": seed + 1, "max_tokens": max_tokens}
        done = pair.stream(prompt, policy=FixedLength(0), **how).run()  # type: ignore[arg-type]
        right.append(done.tokens)
        plain.append(done.summary.tokens_per_second or math.nan)
    found: dict[str, Any] = {}
    for arm, (ngram, has_draft) in ARMS.items():
        pair = Pair(big, small if has_draft else None, 0.0, ngram=ngram, clock=machine)
        policy = AutoLength(machine.curve(), sources=pair.sources)
        ratios, made, n_other = [], Counter[str](), 0
        for seed, (prompt, temperature) in enumerate(prompts):
            pair.forget()
            how = {"sampling": Sampling(temperature=temperature), "seed": seed + 1, "max_tokens": max_tokens}
            done = pair.stream(prompt, policy=policy, **how).run()  # type: ignore[arg-type]
            n_other += done.tokens != right[seed]
            ratios.append((done.summary.tokens_per_second or math.nan) / plain[seed])
            for round_ in done.rounds:
                made[round_.source.value] += len(round_.draft)
        found[arm] = math.exp(statistics.mean(map(math.log, ratios)))
        found[f"{arm}: texts that differ"] = n_other
        found[f"{arm}: draft tokens"] = dict(made)
    found["to best"] = found["both"] / max(found["copies"], found["model"])
    return found


def _show(found: dict[str, Any]) -> None:
    click.echo(
        f"{found['curve']:5} step {found['step']:.2f} {found['text']:21} copies {found['copies']:.3f}  "
        f"model {found['model']:.3f}  both {found['both']:.3f}  = {found['to best']:.3f} of the best  "
        f"{found['both: draft tokens']}",
        err=True,
    )


if __name__ == "__main__":
    main()
