"""`llamaspec compare`: target alone, draft alone, and both together, on one prompt in one process.

The arms take turns, so that a machine that warms up or is busy slows all of them alike. The memories are
emptied before every run: no arm reads a prompt that another has left there.
"""

from __future__ import annotations

import json
import secrets
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from llamaspec.app.opening import open_choice
from llamaspec.app.options import ModelChoice, model_options, sampling_from, sampling_options
from llamaspec.app.pair import Pair
from llamaspec.app.policy import keep_experience, make_policy
from llamaspec.app.prompt import read_prompt
from llamaspec.app.terminal import SlowProgress, stderr_console
from llamaspec.drafters.silent import SilentDrafter
from llamaspec.engine.generate import Completion, TextStream
from llamaspec.errors import PairError

PREDICTABLE_PROMPT = 8 * "    self.assertEqual(result, expected)\n"


@dataclass(frozen=True, slots=True)
class Arm:
    """The measured runs of one way to generate."""

    name: str
    runs: tuple[Completion, ...]

    @property
    def seconds(self) -> list[float]:
        """Decode seconds of each run, without reading the prompt."""
        return [run.summary.decode_seconds for run in self.runs]

    @property
    def tokens_per_second(self) -> float:
        """Median over the runs."""
        return statistics.median(run.summary.tokens_per_second or 0.0 for run in self.runs)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / verified guesses over all runs; None where nothing was verified."""
        verified = sum(run.summary.n_verified for run in self.runs)
        return sum(run.summary.n_accepted for run in self.runs) / verified if verified else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The arms on one prompt."""

    target: Arm
    draft: Arm | None  # None where guesses are copied from earlier text
    speculative: Arm
    same_file: bool  # target and draft are the same model

    @property
    def arms(self) -> tuple[Arm, ...]:
        """In the order in which they are shown."""
        return tuple(arm for arm in (self.target, self.draft, self.speculative) if arm is not None)

    @property
    def same_text(self) -> bool:
        """Whether every speculative run said what the target says alone."""
        pairs = zip(self.target.runs, self.speculative.runs, strict=True)
        return all(alone.tokens == together.tokens for alone, together in pairs)

    def speed_up(self, arm: Arm) -> float:
        """Tokens per second relative to the target alone."""
        return arm.tokens_per_second / self.target.tokens_per_second


@click.command(
    epilog="""\b
Examples:
  llamaspec compare
  llamaspec compare --target llama-70b.Q4.gguf --draft llama-8b.Q4.gguf -t 0 -r 3
  llamaspec compare --target big.gguf --draft ngram -f report.txt
  llamaspec compare --target big.gguf --draft big.gguf       sanity check: no guess is rejected
"""
)
@click.option("--prompt", "-p", metavar="TEXT", help="The prompt; default: a very predictable text.")
@click.option("--file", "-f", metavar="PATH", help="Read the prompt from a file, byte for byte; - is stdin.")
@click.option(
    "--num-runs", "-r", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each arm."
)
@model_options
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout, with every run.")
def compare(prompt: str | None, file: str | None, num_runs: int, as_json: bool, **options: Any) -> None:
    """Measure target alone, draft alone and both together on one prompt."""
    choice = ModelChoice.from_options(options)
    seed = options["seed"] if options["seed"] is not None else secrets.randbits(32)
    text = PREDICTABLE_PROMPT.encode() if prompt is None and file is None else read_prompt(None, prompt, file)
    if choice.draft_path is None and not choice.copies:
        raise PairError("compare needs a draft; name it with --draft, or copy with --draft ngram")
    with open_choice(choice) as pair:
        comparison = _compare(pair, text, seed, num_runs, options)
    if as_json:
        click.echo(json.dumps(_as_json(comparison, seed, options["rule"])))
    else:
        _show(comparison, options["rule"])


def _compare(pair: Pair, text: bytes, seed: int, num_runs: int, options: dict[str, Any]) -> Comparison:
    settings: dict[str, Any] = {
        "sampling": sampling_from(options),
        "max_tokens": options["max_tokens"],
        "rule": options["rule"],
    }
    prompt = pair.target.vocabulary.tokenize(text)
    policy = make_policy(pair, options)
    starts: dict[str, Callable[[int], TextStream]] = {
        "target alone": lambda run: pair.stream(prompt, drafter=SilentDrafter(), seed=seed + run, **settings),
        "speculative": lambda run: pair.stream(prompt, policy=policy, seed=seed + run, **settings),
    }
    if pair.draft is not None:
        alone = Pair(pair.draft, None, 0.0)
        starts["draft alone"] = lambda run: alone.stream(prompt, seed=seed + run, **settings)
    runs: dict[str, list[Completion]] = {name: [] for name in starts}
    with SlowProgress("comparing") as progress:
        for run in range(-1, num_runs):  # run -1 warms up
            for i, (name, start) in enumerate(starts.items()):
                pair.forget()
                completion = start(run).run()
                if run >= 0:
                    runs[name].append(completion)
                progress.part((run + 1) * len(starts) + i + 1, (num_runs + 1) * len(starts))
    keep_experience(pair, policy)
    arms = {name: Arm(name, tuple(completions)) for name, completions in runs.items()}
    same_file = pair.draft is not None and pair.target.path.samefile(pair.draft.path)
    return Comparison(arms["target alone"], arms.get("draft alone"), arms["speculative"], same_file)


def _show(comparison: Comparison, rule: str) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("method", "runs", "seconds", "tokens/s", "speed-up"):
        table.add_column(title, justify="left" if title == "method" else "right")
    for arm in comparison.arms:
        mean = statistics.mean(arm.seconds)
        spread = statistics.stdev(arm.seconds) if len(arm.seconds) > 1 else 0.0
        table.add_row(
            arm.name,
            str(len(arm.runs)),
            f"{mean:.3f} ± {spread:.3f}",
            f"{arm.tokens_per_second:.1f}",
            f"{comparison.speed_up(arm):.2f}x",
        )
    Console().print(table)
    rate = comparison.speculative.acceptance_rate
    click.echo("no guesses were made" if rate is None else f"acceptance: {rate:.1%} of the verified guesses")
    notes = stderr_console()
    if comparison.same_file:
        notes.print(
            "target and draft are the same file: this is the sanity check, no guess should be rejected"
        )
    if comparison.same_text:
        notes.print("the text is the target's own in every run")
    elif rule == "coupled":
        notes.print(
            "in some run the text differs from the target's own: here a wider batch rounds differently"
        )


def _as_json(comparison: Comparison, seed: int, rule: str) -> dict[str, Any]:
    return {
        "seed": seed,
        "rule": rule,
        "same_file": comparison.same_file,
        "same_text": comparison.same_text,
        "acceptance_rate": comparison.speculative.acceptance_rate,
        "arms": [_arm_json(comparison, arm) for arm in comparison.arms],
    }


def _arm_json(comparison: Comparison, arm: Arm) -> dict[str, Any]:
    return {
        "method": arm.name,
        "tokens_per_second": arm.tokens_per_second,
        "speed_up": comparison.speed_up(arm),
        "mean_seconds": statistics.mean(arm.seconds),
        "std_seconds": statistics.stdev(arm.seconds) if len(arm.seconds) > 1 else 0.0,
        "runs": [
            {
                "tokens": run.summary.n_tokens,
                "seconds": run.summary.decode_seconds,
                "prefill_seconds": run.prefill_seconds,
                "acceptance_rate": run.summary.acceptance_rate,
            }
            for run in arm.runs
        ],
    }
