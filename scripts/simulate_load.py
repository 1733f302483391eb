"""What automatic length gains where several texts run at once, on machines that are not here.

    python scripts/simulate_load.py                             # the embedded pair
    python scripts/simulate_load.py --curve Q4_0 --rows 2 -t 0

As scripts/simulate_trees.py: texts, ranks and confidences are real, only the clock is not. An evaluation
takes what a curve says of its width, reading prompts takes nothing. Every arm writes the same texts with as
many rows at once; what counts is the time of all of them. `auto` knows nothing when it begins, `auto, kept`
has the experience of a run of its own at this load, `auto, kept alone` that of one row. Texts are compared
with plain decoding's. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import yaml

from help_text import help_text
from llamaspec import (
    FixedLength,
    ModelOptions,
    Pair,
    Sampling,
    TextStream,
    demo_draft,
    demo_target,
)
from llamaspec.length.auto_length import AutoLength
from llamaspec.protocols import LengthPolicy
from simulate_trees import PROMPTS, Machine

CURVES: dict[str, dict[int, float]] = {  # of each width, next to width 1; measured on two cores
    "Q4_0": dict(
        zip(
            (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32),
            (1, 1.75, 2.5, 1.75, 2.6, 3.2, 3.3, 4.8, 5.4, 8, 10.5),
            strict=True,
        )
    ),
    "F16": dict(
        zip(
            (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32),
            (1, 1.36, 1.47, 1.63, 1.78, 1.84, 2.2, 2.75, 3.2, 4.4, 5.5),
            strict=True,
        )
    ),
}
FIXED = (1, 2, 3, 4)
PLAIN = "no draft"
CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Run:
    """What one arm made of one load."""

    curve: str
    temperature: float
    n_rows: int
    arm: str
    n_tokens: int
    seconds: float
    draft_length: float  # draft tokens in a row's round, on average
    to_plain: float = 1.0  # tokens per second, next to no draft

    @property
    def speed(self) -> float:
        """Tokens per second of all rows together."""
        return self.n_tokens / self.seconds


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=Path, default=demo_target(), show_default="the embedded pair")
@click.option("--draft", type=Path, default=demo_draft(), show_default="the embedded pair")
@click.option("--curve", "curves", type=click.Choice(list(CURVES)), multiple=True, default=tuple(CURVES))
@click.option("--temperature", "-t", "temperatures", type=float, multiple=True, default=(0.0, 1.0))
@click.option("--rows", "-r", type=int, multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option("--step", default=0.06, show_default=True, help="Seconds of a draft step, next to width 1.")
@click.option("--requests", default=3, show_default=True, help="Texts of each row, one after the other.")
@click.option("--max-tokens", "-n", default=96, show_default=True)
def main(
    target: Path,
    draft: Path,
    curves: tuple[str, ...],
    temperatures: tuple[float, ...],
    rows: tuple[int, ...],
    step: float,
    requests: int,
    max_tokens: int,
) -> None:
    """Simulate loads."""
    found: list[Run] = []
    for curve in curves:
        machine = Machine(CURVES[curve], step, reads_free=True)
        options = _options(max(rows))
        with (
            machine.models(target, draft, options) as (big, small),
            Pair(big, small, 0.0, clock=machine) as pair,
        ):
            for temperature in temperatures:
                for n_rows in rows:
                    load = Load(pair, machine, curve, temperature, n_rows, requests, max_tokens)
                    found += load.compare()
    print(json.dumps({"step": step, "max_tokens": max_tokens, "runs": [asdict(run) for run in found]}))


def _options(n_rows: int) -> ModelOptions:
    """Caches whose values have one attention kernel for all widths, so that texts can be compared."""
    return ModelOptions(n_ctx=CONTEXT, n_cells=(n_rows + 1) * CONTEXT, threads=1, cache_type_v="bf16")


@dataclass(frozen=True, slots=True)
class Load:
    """So many rows at once, each with as many texts."""

    pair: Pair
    machine: Machine
    curve: str
    temperature: float
    n_rows: int
    n_requests: int
    max_tokens: int

    def compare(self) -> list[Run]:
        """Every arm, the first being plain decoding."""
        alone, kept, cold = AutoLength(), AutoLength(), AutoLength()
        plain, right = self._run(PLAIN, FixedLength(0))
        self._run("", alone, n_rows=1)
        self._run("", kept)
        arms: dict[str, LengthPolicy] = {f"K={k}": FixedLength(k) for k in FIXED}
        arms["auto"] = cold
        arms["auto, kept"] = AutoLength(kept.experience())
        arms["auto, kept alone"] = AutoLength(alone.experience())
        runs, n_other_texts = [plain], 0
        for arm, policy in arms.items():
            run, texts = self._run(arm, policy, plain)
            runs.append(run)
            n_other_texts += sum(text != other for text, other in zip(texts, right, strict=True))
        click.echo(
            f"{self.curve}, temperature {self.temperature:g}, {self.n_rows} rows"
            + (f", {n_other_texts} TEXTS DIFFER" if n_other_texts else ""),
            err=True,
        )
        for run in runs:
            click.echo(f"  {run.arm:18} {run.to_plain:.3f}  K {run.draft_length:.2f}", err=True)
        return runs

    def _run(
        self, arm: str, policy: LengthPolicy, plain: Run | None = None, n_rows: int | None = None
    ) -> tuple[Run, list[tuple[int, ...]]]:
        prompts = [entry["text"] for entry in yaml.safe_load(PROMPTS.read_text())]
        n_rows, begin = n_rows or self.n_rows, self.machine.now
        self.pair.forget()
        streams: list[TextStream] = []
        running: list[TextStream] = []
        n_texts = n_rows * self.n_requests
        while running or len(streams) < n_texts:
            while len(running) < n_rows and len(streams) < n_texts:
                running.append(
                    self.pair.stream(
                        prompts[len(streams) % len(prompts)],
                        sampling=Sampling(temperature=self.temperature),
                        seed=len(streams),
                        max_tokens=self.max_tokens,
                        policy=policy,
                    )
                )
                streams.append(running[-1])
                running[-1].ready()
            self.pair.step()
            for stream in running:
                stream.ready()
            running = [stream for stream in running if not stream.is_over]
        texts = [stream.completion.tokens for stream in streams]
        seconds, n_tokens = self.machine.now - begin, sum(map(len, texts))
        rounds = [round_ for stream in streams for round_ in stream.rounds]
        n_drafted = sum(len(round_.draft) for round_ in rounds)
        speed = n_tokens / seconds
        run = Run(
            self.curve,
            self.temperature,
            n_rows,
            arm,
            n_tokens,
            seconds,
            n_drafted / len(rounds),
            speed / plain.speed if plain else 1.0,
        )
        return run, texts


if __name__ == "__main__":
    main()
