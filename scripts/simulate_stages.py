"""What a draft of a draft gains, on simulated models: real loop, real policies, a clock that counts costs.

    python scripts/simulate_stages.py
    python scripts/simulate_stages.py --costs 0.3 0.01 --agreement 0.85 0.7

The target says random tokens. Its draft agrees with it, and the draft's draft with the draft, with the given
probabilities; how sure each is tells how likely it is right. An evaluation costs what its width costs on a
measured curve, times the model's cost. One line for each curve: tokens per second of every arm, next to plain
decoding, and of all three models next to the best of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import click
import numpy as np

from help_text import help_text
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.no_drafter import NoDrafter
from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.speculate import Speculation
from llamaspec.engine.staged import StagedDrafter
from llamaspec.engine.stream import TextStream
from llamaspec.engine.write import TextPlan
from llamaspec.errors import ContextFullError
from llamaspec.length.auto_length import AutoLength
from llamaspec.protocols import Drafter
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.parameters import Sampling
from llamaspec.sampling.random_streams import SeededStreams, StageStreams
from llamaspec.values import DRAFT, TARGET, ForwardRequest, Logits, Source, TokenArray

CURVES = {  # milliseconds by width; docs/hardware.md says how they differ
    "q4_0": {1: 16.4, 2: 26.4, 3: 36.5, 4: 29.2, 5: 42.3, 6: 52.5, 8: 54.0, 12: 79.0, 16: 89.0},
    "f16": {1: 42.5, 2: 58.0, 3: 62.5, 4: 69.2, 5: 75.5, 6: 78.0, 8: 94.3, 12: 117.0, 16: 137.0},
    "flat": {1: 10.0, 2: 10.3, 4: 10.7, 8: 12.0, 12: 13.5, 16: 15.0},
}
V, CONTEXT, SECOND = 256, 4096, f"{DRAFT}-2"
OVERHEAD = 50e-6  # seconds of the controller, each time that it reads the clock


class Clock:
    """Stands still but for evaluations, and a little for the controller."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        self.now += OVERHEAD / 2
        return self.now


@dataclass
class Simulated:
    """A model that agrees with another one so often as `agreement` says."""

    clock: Clock
    curve: dict[int, float]
    cost: float  # seconds of width 1 next to the target's
    seed: int
    agreement: float = 1.0
    other: Simulated | None = None
    vocabulary_size: int = V
    context_size: int = CONTEXT
    batch_size: int = 512
    max_scored: int = 65
    max_mixed: int = 0
    n_evaluations: int = 0
    cached: dict[int, TokenArray] = field(default_factory=dict)

    def says(self, path: TokenArray) -> tuple[int, float]:
        """The token after a path, and how sure that is."""
        key = [self.seed, len(path), int(path[-1]), int(path[-2]) if len(path) > 1 else 0]
        rng = np.random.default_rng(key)
        token = int(rng.integers(V))
        if self.other is None:
            return token, 0.9
        spread = min(self.agreement, 1 - self.agreement) * 0.9
        chance = self.agreement + spread * float(rng.choice([-1.0, 1.0]))
        return (self.other.says(path)[0] if rng.random() < chance else token), chance

    def prepare(self, batch: Sequence[tuple[int, ForwardRequest, int]]) -> list[int | ContextFullError]:
        """Tokens that are cached."""
        answers: list[int | ContextFullError] = []
        for row, request, _ in batch:
            known, most = self.cached.get(row, request.tokens[:0]), len(request.tokens) - request.n_logits
            n = min(len(known), most)
            different = (known[:n] != request.tokens[:n]).nonzero()[0]
            answers.append(int(different[0]) if len(different) else n)
            self.cached[row] = request.tokens[: answers[-1]]
        return answers

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0) -> list[Logits]:
        """Say, and let the clock go on."""
        width, answers = n_padding, []
        for row, request in batch:
            width += request.n_tokens - len(self.cached[row])
            self.cached[row] = whole = np.concatenate((request.tokens, request.draft))
            logits = np.zeros((request.n_scored, V), np.float32)
            for i in range(request.n_scored):
                token, chance = self.says(whole[: len(whole) - request.n_scored + 1 + i])
                logits[i, token] = np.log(chance / (1 - chance) * (V - 1))
            answers.append(logits)
        widths, times = list(self.curve), list(self.curve.values())
        beyond = max(width - widths[-1], 0) * (times[-1] - times[-2]) / (widths[-1] - widths[-2])
        milliseconds = float(np.interp(width, widths, times)) + beyond
        self.clock.now += self.cost * milliseconds / 1000
        self.n_evaluations += 1
        return answers

    def release(self, row: int) -> None:
        """A row has ended."""
        self.cached.pop(row, None)

    def forget(self) -> None:
        """Empty the cache."""
        self.cached.clear()

    def abort(self) -> None:
        """Nothing takes long."""


class NoText:
    """A vocabulary whose tokens have no text."""

    def tokenize(self, text: bytes) -> TokenArray:
        """Its bytes."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def piece(self, token: int) -> bytes:
        """Something."""
        return b"."

    def is_end(self, token: int) -> bool:
        """No token is."""
        return False


def rate(
    arm: str, curve: str, costs: Sequence[float], agreement: Sequence[float], n: int, texts: int
) -> float:
    """Tokens per second of one arm: the second of texts on, when policies have learnt."""
    clock = Clock()
    target = Simulated(clock, CURVES[curve], 1.0, 1)
    draft = Simulated(clock, CURVES[curve], costs[0], 2, agreement[0], target)
    small = Simulated(clock, CURVES[curve], costs[1], 3, agreement[1], draft)
    models = {TARGET: target, DRAFT: small if arm == "small" else draft, SECOND: small}
    sampling, rule = Sampling(temperature=0.0), RULES["coupled"]
    outer = AutoLength(sources={Source.STAGE if arm == "all" else Source.MODEL})
    inner, scheduler, begin = AutoLength(), Scheduler(models, clock=clock), 0.0
    for i in range(texts):
        streams, stage = SeededStreams(i), inner.start_row(drops=rule.drops)
        alone = ModelDrafter(V, CONTEXT, sampling, rule, streams)
        drafter: Drafter = NoDrafter() if arm == "plain" else alone
        if arm == "all":
            own = StageStreams(streams)
            helper = ModelDrafter(V, CONTEXT, sampling, rule, own, model=SECOND)
            drafter = StagedDrafter(alone, helper, stage, own, clock, draft.max_scored)
        speculation = Speculation(
            drafter,
            outer.start_row(drops=rule.drops),
            rule,
            sampling,
            streams,
            CONTEXT,
            target.max_scored,
            others=[stage],
        )
        prompt = np.array([i, 1, 2, 3], np.int32)
        if i == 1:
            begin = clock.now
        TextStream(TextPlan(prompt, NoText(), speculation, n), scheduler).run()
    return (texts - 1) * n / (clock.now - begin)


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--costs",
    type=(float, float),
    default=(0.12, 0.01),
    show_default=True,
    help="Of the draft and of its draft, next to the target's.",
)
@click.option(
    "--agreement",
    type=(float, float),
    default=(0.85, 0.7),
    show_default=True,
    help="Of the draft with the target, and of its draft with it.",
)
@click.option("--max-tokens", "-n", type=int, default=256, show_default=True)
@click.option(
    "--texts", type=int, default=4, show_default=True, help="One after the other; the first warms up."
)
def main(costs: tuple[float, float], agreement: tuple[float, float], max_tokens: int, texts: int) -> None:
    """Print how the arms compare."""
    for curve in CURVES:
        rates = {
            arm: rate(arm, curve, costs, agreement, max_tokens, texts)
            for arm in ("plain", "draft", "small", "all")
        }
        best = max(rates["plain"], rates["draft"], rates["small"])
        told = ", ".join(f"{arm} {speed / rates['plain']:.2f}" for arm, speed in rates.items())
        click.echo(f"{curve:5} {told}; all / best two {rates['all'] / best:.3f}")


if __name__ == "__main__":
    main()
