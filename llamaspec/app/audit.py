"""`llamaspec audit`: check on this machine, with these files, that guessing does not change the text.

The text is generated with guesses, then replayed one position at a time without them. Where the replay
chooses another token, a wider batch was rounded differently: a fork, with how close the choice was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

from llamaspec.app.identity import logit_differences
from llamaspec.app.opening import open_choice
from llamaspec.app.options import ModelChoice, model_options, sampling_from, sampling_options
from llamaspec.app.pair import Pair
from llamaspec.app.policy import make_policy
from llamaspec.app.prompt import read_prompt
from llamaspec.app.terminal import SlowProgress
from llamaspec.drafters.silent import SilentDrafter
from llamaspec.engine.generate import Completion
from llamaspec.errors import PairError
from llamaspec.protocols import Use
from llamaspec.rules.dice import SeededDice
from llamaspec.rules.sampling import distribution
from llamaspec.values import Ask, Sampling, TokenArray

DEFAULT_PROMPT = "def read_lines(path):\n"
DEFAULT_SEED = 0


@dataclass(frozen=True, slots=True)
class Fork:
    """A token that plain decoding would have chosen differently after the same text."""

    index: int  # in the completion
    width: int  # positions that were evaluated at once when it was chosen
    said: str  # with guesses
    alone: str  # without
    logit_gap: float  # between the two best logits there, evaluated alone


@dataclass(frozen=True, slots=True)
class Audit:
    """What the replay of one text found."""

    n_tokens: int
    forks: tuple[Fork, ...]
    first_difference: int | None  # index at which plain decoding with the same seed differs; None = same text
    largest_logit_difference: dict[int, float]  # width -> against width 1, over the replayed text

    @property
    def identical_widths(self) -> list[int]:
        """Widths that gave the very numbers of width 1."""
        return [width for width, difference in self.largest_logit_difference.items() if difference == 0]


@click.command(
    epilog="""\b
Examples:
  llamaspec audit --target big.gguf --draft small.gguf
  llamaspec audit --target big.gguf --draft small.gguf -t 0 -n 1000 -f prompt.txt --json
"""
)
@click.option("--prompt", "-p", metavar="TEXT", help="The prompt; default: the beginning of a function.")
@click.option("--file", "-f", metavar="PATH", help="Read the prompt from a file, byte for byte; - is stdin.")
@model_options
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
def audit(prompt: str | None, file: str | None, as_json: bool, **options: Any) -> None:
    """Check that the text with guesses is the text without. Exit code 1 where it is not."""
    choice = ModelChoice.from_options(options)
    if choice.draft_path is None and not choice.copies:
        raise PairError("audit needs a draft; name it with --draft, or copy with --draft ngram")
    text = DEFAULT_PROMPT.encode() if prompt is None and file is None else read_prompt(None, prompt, file)
    seed = DEFAULT_SEED if options["seed"] is None else options["seed"]
    with open_choice(choice) as pair, SlowProgress("auditing") as progress:
        tokens = pair.target.vocabulary.tokenize(text)
        found = run_audit(pair, tokens, seed, sampling_from(options), options, progress)
    if as_json:
        click.echo(json.dumps({"seed": seed, **asdict(found), "identical_widths": found.identical_widths}))
    else:
        _show(found)
    if found.first_difference is not None or found.forks:
        sys.exit(1)


def run_audit(
    pair: Pair,
    prompt: TokenArray,
    seed: int,
    sampling: Sampling,
    options: dict[str, Any],
    progress: SlowProgress,
) -> Audit:
    """Generate with guesses and without, replay, compare widths."""
    settings: dict[str, Any] = {"sampling": sampling, "seed": seed, "max_tokens": options["max_tokens"]}
    guessed = pair.stream(prompt, policy=make_policy(pair, options), **settings).run()
    progress(0.25)
    pair.target.forget()
    plain = pair.stream(prompt, drafter=SilentDrafter(), **settings).run()
    progress(0.5)
    forks = tuple(_forks(pair, prompt, guessed, SeededDice(seed), sampling))
    progress(0.75)
    return Audit(
        n_tokens=len(guessed.tokens),
        forks=forks,
        first_difference=_first_difference(guessed.tokens, plain.tokens),
        largest_logit_difference=_width_differences(pair, prompt, guessed),
    )


def _first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _forks(
    pair: Pair, prompt: TokenArray, guessed: Completion, dice: SeededDice, sampling: Sampling
) -> Iterator[Fork]:
    """Replay the text one position at a time."""
    pair.target.forget()
    path = np.concatenate([prompt, np.array(guessed.tokens, dtype=np.int32)])
    widths = [len(round_.drafted) + 1 for round_ in guessed.rounds for _ in round_.tokens]
    for i, said in enumerate(guessed.tokens):
        position = len(prompt) + i
        scores = pair.target.logits([Ask(0, path[:position], 1)])[0][0]
        alone = dice.choose(distribution(scores, sampling, path[:position]), Use.TOKEN, position)
        if alone != said:
            second, best = np.partition(scores, -2)[-2:]
            yield Fork(i, widths[i], _text(pair, said), _text(pair, alone), float(best - second))


def _width_differences(pair: Pair, prompt: TokenArray, guessed: Completion) -> dict[int, float]:
    """Largest logit difference of each width against width 1, at the beginning of the text."""
    widest = min(16, len(guessed.tokens))
    if widest < 2:
        return {}
    path = np.concatenate([prompt, np.array(guessed.tokens[:widest], dtype=np.int32)])
    pair.target.forget()
    return logit_differences(pair.target, path, tuple(range(2, widest + 1)))


def _text(pair: Pair, token: int) -> str:
    return pair.target.vocabulary.piece(token).decode("utf-8", errors="replace")


def _show(found: Audit) -> None:
    if found.first_difference is None:
        click.echo(f"same seed, same text: all {found.n_tokens} tokens are those of plain decoding")
    else:
        click.echo(f"the texts differ from token {found.first_difference} on")
    click.echo(f"replayed one token at a time: {len(found.forks)} forks in {found.n_tokens} tokens")
    for fork in found.forks:
        click.echo(
            f"  token {fork.index}, batch of {fork.width}: {fork.said!r} with guesses, {fork.alone!r} alone; "
            f"the two best logits lie {fork.logit_gap:.4f} apart"
        )
    widths = ", ".join(str(width) for width in found.identical_widths) or "none"
    click.echo(f"widths up to 16 that are bit-identical with width 1 here: {widths}")
    if not found.forks:
        return
    click.echo("a batch of several positions is rounded differently on this machine; --exact avoids that")
