"""What drafting ahead while the target verifies would gain, where the two compute on different devices.

    python scripts/simulate_ahead.py
    python scripts/simulate_ahead.py --step 0.1 --step 0.3 --curve GPU -t 0.8

As PEARL's post-verify (arXiv 2408.11850): the draft goes on behind its last token, with its own guess for the
target's next one, until the verification is over; what it has drafted is used where all draft tokens and that
guess turn out right, and dropped elsewhere. The draft step that is running then is waited for.

Texts and agreement are real: under the coupled rule the text alone says where a draft token is accepted, so
rounds are replayed from one reading (llamaspec.draft_making.worth). Only costs are not: an evaluation takes
what a curve says of its width, a draft step a share of width 1, and neither slows the other down. Each arm
has its best constant number of draft tokens, 0 being plain decoding. The last line of stdout is one JSON
array.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import yaml

from help_text import help_text
from llamaspec import ModelOptions, Sampling, demo_draft, demo_target, open_pair
from llamaspec.draft_making.worth import Agreed, read_along, write_texts
from llamaspec.measure.compare import Task
from simulate_load import CURVES
from simulate_trees import PROMPTS

ALL_CURVES: dict[str, Mapping[int, float]] = {**CURVES, "GPU": {1: 1, 2: 1.03, 4: 1.07, 8: 1.2, 16: 1.5}}
MOST = 12  # draft tokens of a round


@dataclass(frozen=True, slots=True)
class Costs:
    """In evaluations of a single position by the target."""

    verify: Sequence[float]  # [MOST + 1] with 0, 1, ... draft tokens
    step: float  # one draft token


@dataclass(frozen=True, slots=True)
class Found:
    """Both arms at one cost, next to plain decoding."""

    agreement: float  # share of draft tokens that are accepted, given the text before them
    curve: str
    step: float
    one_after_the_other: float
    n_draft: int
    ahead: float
    n_draft_ahead: int

    @property
    def gain(self) -> float:
        """Tokens per second with drafting ahead, next to those without."""
        return self.ahead / self.one_after_the_other


def seconds(agreed: Agreed, n_draft: int, costs: Costs, *, ahead: bool) -> float:
    """Of one text in rounds of `n_draft` draft tokens.

    Examples
    --------
    >>> two_steps = Costs([1.0, 1.0, 1.0], 0.5)  # 0.5 + 1, and then the next draft is there already
    >>> seconds(np.ones(4, dtype=bool), 1, two_steps, ahead=False), seconds(
    ...     np.ones(4, dtype=bool), 1, two_steps, ahead=True
    ... )
    (3.0, 2.5)
    """
    at = n_ready = 0
    total = 0.0
    while at < len(agreed):
        total += max(0, n_draft - n_ready) * costs.step
        n_ready = max(n_ready, n_draft)
        verifying = costs.verify[n_draft]
        if ahead and n_draft:
            wanted = 2 * n_draft + 1 - n_ready  # the guess, and the whole next draft
            n_more = min(wanted, math.ceil(verifying / costs.step))
            n_ready += n_more
            verifying = max(verifying, n_more * costs.step)
        total += verifying
        rejected = np.flatnonzero(~agreed[at : at + n_draft + 1])  # with the guess for the target's token
        at += min(int(rejected[0]) if len(rejected) else n_draft, n_draft) + 1
        n_ready = 0 if len(rejected) else max(0, n_ready - n_draft - 1)
    return total


def compare(agreed: Sequence[Agreed], curve: str, step: float) -> Found:
    """The best number of draft tokens of each arm."""
    widths = ALL_CURVES[curve]
    verify = [float(np.interp(k + 1, list(widths), list(widths.values()))) for k in range(MOST + 1)]
    costs, n_tokens = Costs(verify, step), sum(map(len, agreed))
    best: list[tuple[float, int]] = []
    for ahead in (False, True):
        totals = [sum(seconds(one, k, costs, ahead=ahead) for one in agreed) for k in range(MOST + 1)]
        k = int(np.argmin(totals))
        best.append((n_tokens / totals[k], k))
    return Found(float(np.mean(np.concatenate(agreed))), curve, step, *best[0], *best[1])


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=Path, default=demo_target(), show_default="the embedded pair")
@click.option("--draft", type=Path, default=demo_draft(), show_default="the embedded pair")
@click.option(
    "--curve", "curves", type=click.Choice(list(ALL_CURVES)), multiple=True, default=tuple(ALL_CURVES)
)
@click.option("--step", "steps", type=float, multiple=True, default=(0.02, 0.05, 0.1, 0.2, 0.3, 0.5))
@click.option("--temperature", "-t", "temperatures", type=float, multiple=True, default=(0.0, 1.0))
@click.option("--agreement", "-a", "agreements", type=float, multiple=True, default=(0.7, 0.8, 0.9, 0.95),
              help="Besides, texts where each draft token is accepted with this probability.")  # fmt: skip
@click.option("--max-tokens", "-n", default=96, show_default=True)
def main(
    target: Path,
    draft: Path,
    curves: tuple[str, ...],
    steps: tuple[float, ...],
    temperatures: tuple[float, ...],
    agreements: tuple[float, ...],
    max_tokens: int,
) -> None:
    """Simulate drafting ahead."""
    texts = _read(target, draft, temperatures, max_tokens)
    random = np.random.default_rng(0)
    for agreement in agreements:
        texts[f"{agreement:g} accepted"] = [random.random(20_000) < agreement]
    found: list[Found] = []
    for name, agreed in texts.items():
        click.echo(f"{name} ({np.mean(np.concatenate(agreed)):.2f} of draft tokens accepted)", err=True)
        for curve in curves:
            at = [compare(agreed, curve, step) for step in steps]
            cells = (f"{one.step:g}: {one.one_after_the_other:.2f} -> {one.ahead:.2f}" for one in at)
            click.echo(f"  {curve:5} {'  '.join(cells)}", err=True)
            found += at
    print(json.dumps([{**asdict(one), "gain": one.gain} for one in found]))


def _read(
    target: Path, draft: Path, temperatures: Sequence[float], max_tokens: int
) -> dict[str, list[Agreed]]:
    """Where the draft agrees with what the target writes."""
    options = ModelOptions(n_ctx=512, threads=1)
    prompts = [entry["text"] for entry in yaml.safe_load(PROMPTS.read_text())]
    texts: dict[str, list[Agreed]] = {}
    with open_pair(target, draft, target_options=options, draft_options=options) as pair:
        if pair.draft is None:
            raise click.UsageError("a draft model is needed")
        for temperature in temperatures:
            sampling, tasks = Sampling(temperature=temperature), []
            for prompt in prompts:
                tokens = pair.target.vocabulary.tokenize(prompt.encode())
                tasks.append(Task(tokens, sampling, 0, max_tokens, "coupled"))
            agreed = [read_along(pair.draft, text, sampling, 0) for text in write_texts(pair.target, tasks)]
            texts[f"temperature {temperature:g}"] = agreed
    return texts


if __name__ == "__main__":
    main()
