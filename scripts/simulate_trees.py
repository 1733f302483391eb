"""What trees of draft tokens would gain on machines that are not here: real texts, pretended seconds.

    python scripts/simulate_trees.py                            # the embedded pair
    python scripts/simulate_trees.py --draft weak.gguf --step 0.12

Target and draft compute as always, so ranks, confidences and texts are real; only the clock is not. An
evaluation takes what a curve says of its width, so figures repeat on any machine; automatic length knows
the curve, as after a probe. Ratios to plain decoding, geometric mean over the prompts; texts are compared
with plain decoding's. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml

from help_text import help_text
from llamaspec import FixedLength, LlamaModel, ModelOptions, Pair, Sampling, demo_draft, demo_target
from llamaspec.length.auto_length import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.llama.options import DRAFT_SCORED
from llamaspec.protocols import LengthPolicy

PROMPTS = Path(__file__).with_name("prompts.yaml")
CURVES: dict[str, dict[int, float]] = {  # milliseconds of each width; the last two measured on two cores
    "flat": {1: 1.0, 16: 1.2},
    "F16": dict(
        zip((1, 2, 3, 4, 5, 6, 8, 12, 16), (42.5, 58, 62.5, 69.2, 75.5, 78, 94.3, 117, 137), strict=True)
    ),
    "Q4_0": dict(
        zip((1, 2, 3, 4, 5, 6, 8, 12, 16), (16.4, 26.4, 36.5, 29.2, 42.3, 52.5, 54, 79, 89), strict=True)
    ),
}
CHAINS = (1, 2, 3, 4, 5, 6, 8)
N_POSITIONS = 513
ONE_THREAD = ModelOptions(threads=1)


class Machine:
    """A clock that evaluations move on. `reads_free`: but not those that only read a prompt."""

    def __init__(self, curve: dict[int, float], step: float, *, reads_free: bool = False) -> None:
        widths, times = list(curve), list(curve.values())
        slope = (times[-1] - times[-2]) / (widths[-1] - widths[-2])
        every = np.arange(N_POSITIONS)
        beyond = np.maximum(every - widths[-1], 0) * slope
        self._seconds = np.interp(every, widths, times) / times[0] * 0.04 + beyond / times[0] * 0.04
        self._step, self._reads_free = step, reads_free
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now

    def curve(self) -> CostCurve:
        """What a probe would find."""
        return CostCurve(
            tuple(range(1, 18)), tuple(self._seconds[1:18].tolist()), self._step * self._seconds[1]
        )

    @contextmanager
    def models(
        self, target: Path, draft: Path, options: ModelOptions = ONE_THREAD
    ) -> Iterator[tuple[LlamaModel, LlamaModel]]:
        """A target and its draft that take the time of this machine."""
        with (
            LlamaModel(target, options) as big,
            LlamaModel(draft, replace(options, max_scored=DRAFT_SCORED)) as small,
        ):
            self.pretend(big, is_draft=False)
            self.pretend(small, is_draft=True)
            yield big, small

    def pretend(self, model: LlamaModel, *, is_draft: bool) -> None:
        """Let a model take the time of this machine."""
        cached: dict[int, int] = {}
        prepare, evaluate = model.prepare, model.evaluate

        def prepared(batch: Any) -> Any:
            answers = prepare(batch)
            cached.update({row: n for (row, _, _), n in zip(batch, answers, strict=True)})
            return answers

        def evaluated(batch: Any, n_padding: int = 0) -> Any:
            width = n_padding + sum(request.n_tokens - cached[row] for row, request in batch)
            if not self._reads_free or any(request.n_scored for _, request in batch):
                self.now += float(self._seconds[width]) * (self._step if is_draft else 1.0)
            return evaluate(batch, n_padding)

        model.prepare, model.evaluate = prepared, evaluated  # type: ignore[method-assign]


def _policies(machine: Machine) -> dict[str, Callable[[], LengthPolicy]]:
    arms: dict[str, Callable[[], LengthPolicy]] = {f"K={k}": lambda k=k: FixedLength(k) for k in CHAINS}  # type: ignore[misc]
    for name, trees in (("auto, chains", False), ("auto", True)):
        policy = AutoLength(machine.curve(), trees=trees)
        arms[name] = lambda policy=policy: policy  # type: ignore[misc]
    return arms


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=Path, default=demo_target(), show_default="the embedded pair")
@click.option("--draft", type=Path, default=demo_draft(), show_default="the embedded pair")
@click.option("--curve", "curves", type=click.Choice(list(CURVES)), multiple=True, default=tuple(CURVES))
@click.option("--temperature", "-t", "temperatures", type=float, multiple=True, default=(0.0, 0.8, 1.0))
@click.option("--step", default=0.06, show_default=True, help="Seconds of a draft step, next to width 1.")
@click.option("--max-prompts", type=int, help="Only the first of them.")
@click.option("--max-tokens", "-n", default=96, show_default=True)
def main(
    target: Path,
    draft: Path,
    curves: tuple[str, ...],
    temperatures: tuple[float, ...],
    step: float,
    max_prompts: int | None,
    max_tokens: int,
) -> None:
    """Simulate chains and trees."""
    prompts = [entry["text"] for entry in yaml.safe_load(PROMPTS.read_text())][:max_prompts]
    found: list[dict[str, Any]] = []
    for curve in curves:
        for temperature in temperatures:
            machine = Machine(CURVES[curve], step)
            with machine.models(target, draft) as (big, small), Pair(big, small, 0.0, clock=machine) as pair:
                found += _compare(pair, machine, prompts, temperature, max_tokens, curve)
    print(json.dumps({"step": step, "max_tokens": max_tokens, "arms": found}))


def _compare(
    pair: Pair, machine: Machine, prompts: list[str], temperature: float, max_tokens: int, curve: str
) -> list[dict[str, Any]]:
    arms = {"plain": lambda: FixedLength(0), **_policies(machine)}
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    drafted: dict[str, list[float]] = {arm: [] for arm in arms}
    n_other_texts = 0
    for seed, prompt in enumerate(prompts):
        right: tuple[int, ...] | None = None
        for arm, make_policy in arms.items():
            pair.forget()
            stream = pair.stream(
                prompt,
                sampling=Sampling(temperature=temperature),
                seed=seed,
                max_tokens=max_tokens,
                policy=make_policy(),
            )
            done = stream.run()
            right = done.tokens if right is None else right
            n_other_texts += done.tokens != right
            speeds[arm].append(done.summary.tokens_per_second or math.nan)
            trees = [round_.draft.parents is not None for round_ in done.rounds]
            drafted[arm].append(statistics.mean(trees) if trees else 0.0)
    means = {
        arm: math.exp(statistics.mean(math.log(a / b) for a, b in zip(own, speeds["plain"], strict=True)))
        for arm, own in speeds.items()
    }
    best = max(mean for arm, mean in means.items() if arm.startswith("K="))
    click.echo(
        f"{curve}, temperature {temperature:g}: best chain {best:.3f}, texts that differ {n_other_texts}",
        err=True,
    )
    for arm, mean in means.items():
        share = statistics.mean(drafted[arm])
        click.echo(
            f"  {arm:18} {mean:.3f}  {mean / best:.3f} of the best chain  trees in {share:.0%} of rounds",
            err=True,
        )
    return [
        {
            "curve": curve,
            "temperature": temperature,
            "arm": arm,
            "to_plain": mean,
            "to_best_chain": mean / best,
        }
        for arm, mean in means.items()
    ]


if __name__ == "__main__":
    main()
