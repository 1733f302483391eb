"""Replay edits of whole files without a model, and compare copies with perfect foresight.

\b
    python scripts/replay_edits.py --vocabulary coder-1.5b-Q4_K_M.gguf

The answers are known. `ideal` ones are the files of `llamaspec bench` as replay_edits.yaml changes them;
`real` ones were written by Qwen2.5-Coder 1.5B (Q4_K_M, greedy) for the same prompts; `hold-out` are its
answers to replay_holdout.yaml, which nothing was tuned on. The loop, the drafter and the automatic length
are those of llamaspec; only the target is played, by the known answer, and its seconds come from a curve of
costs. All costs are in the time of one plain token, so plain decoding takes as many as the answer has tokens:

\b
first, later: a completion of its own; completions of a pair that has written all of them before
length: the same copies, each cut exactly where it would be rejected, and made only where that gains
all: the answer itself is known, and split as is fastest
rejected, short: what later loses to length in copies that were too long, and in all other rounds
rounds, drafted, accepted: of later
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import yaml

from llamaspec.drafters.ngram import MIN_MATCH_BESIDE_MODEL, NgramDrafter
from llamaspec.engine.speculate import Speculation, speculate
from llamaspec.length.fixed import FixedLength
from llamaspec.length.policy import AutoLength
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.weights import Weights
from llamaspec.measure.bench import TASKS, read_tasks
from llamaspec.pair import demo_target
from llamaspec.protocols import LengthPolicy, PromptReading
from llamaspec.sampling.acceptance_rules import Coupled
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import LONGEST_COPY, Draft, Forward, Round, Source, TokenArray, n_common

HERE = Path(__file__).parent
CHANGES = HERE / "replay_edits.yaml"
ANSWERS = HERE / "replay_answers.yaml"
HOLDOUT = HERE / "replay_holdout.yaml"
IDEAL, REAL, HOLD_OUT = "ideal", "real", "hold-out"
GROUP = "edits"
PLAIN_SECONDS = 0.1  # of a large model on a CPU
CHUNK = 512  # positions of a prompt that are processed at once
NO_LOGITS = 0.7  # cost of a prompt chunk over that of a verification of the same width, measured
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 512)  # upper ends of the groups of rounds that are counted
CURVES: dict[str, dict[int, float]] = {  # evaluations of one position by width, measured on four hosts
    "F16": {1: 1, 2: 1.25, 4: 1.46, 8: 1.98, 16: 2.9, 32: 5.1, 64: 9.5},
    "F16, other": {1: 1, 2: 1.56, 4: 1.80, 8: 2.45},
    "Q4_K_M": {1: 1, 2: 1.65, 4: 2.8, 8: 5.8, 16: 7.2, 64: 22},
    "Q4_K_M, 1 core": {1: 1, 2: 1.9, 4: 3.6, 8: 7.2, 16: 11.4, 32: 22, 64: 36, 128: 60, 206: 104},
}

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """A prompt with a file, and the answer with the changed file."""

    name: str
    prompt: TokenArray
    answer: TokenArray


@dataclass(frozen=True, slots=True)
class Played:
    """A replayed completion."""

    cost: float  # in plain tokens
    rounds: tuple[Round, ...]

    @property
    def n_drafted(self) -> int:
        """Return the number of draft tokens that were verified."""
        return sum(len(round_.draft) for round_ in self.rounds)

    @property
    def n_accepted(self) -> int:
        """Return the number of draft tokens that were accepted."""
        return sum(round_.n_accepted for round_ in self.rounds)


def edits(vocabulary_file: Path, answers: str = IDEAL) -> list[Edit]:
    """Return the edits with their answers, in the tokens of a model."""
    changes: dict[str, list[tuple[str, str]]] = _read(CHANGES)
    written: dict[str, str] = _read(ANSWERS)
    weights = Weights(vocabulary_file, ModelOptions(), vocabulary_only=True)
    try:
        words = weights.vocabulary
        found = []
        for task in read_tasks(
            HOLDOUT if answers == HOLD_OUT else TASKS, (answers if answers == HOLD_OUT else GROUP,)
        ):
            prompt = task.prompts[0]
            answer = edited(prompt, changes[task.name]) if answers == IDEAL else written[task.name]
            tokens = words.tokenize(answer.encode(), add_special=False)
            found.append(Edit(task.name, words.tokenize(f"{prompt}\n".encode()), tokens))
        return found
    finally:
        weights.close()


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def edited(prompt: str, changes: Sequence[tuple[str, str]]) -> str:
    """Return the file at the end of a prompt, changed, between its fences."""
    file = prompt[prompt.index("```") :]
    for old, new in changes:
        if old not in file:
            raise click.ClickException(f"{CHANGES.name} changes {old!r}, which does not occur")
        file = file.replace(old, new)
    return file


def costs_of(curve: Mapping[int, float], widest: int) -> Array:
    """Return costs of 0, 1, ... `widest` positions, interpolated; the last slope is extrapolated."""
    widths, costs = [*curve], [*curve.values()]
    slope = (costs[-1] - costs[-2]) / (widths[-1] - widths[-2])
    far = max(widest, widths[-1]) + 1
    found: Array = np.interp(
        np.arange(widest + 1), [*widths, far], [*costs, costs[-1] + slope * (far - widths[-1])]
    )
    return found


def play(edit: Edit, costs: Array, policy: LengthPolicy, min_match: int = MIN_MATCH_BESIDE_MODEL) -> Played:
    """Generate a known answer with the real loop, drafter and policy."""
    known, ids = np.unique(np.concatenate((edit.prompt, edit.answer)), return_inverse=True)
    text, n_prompt = ids.astype(np.int32), len(edit.prompt)
    drafter, rounds = NgramDrafter(min_match), list[Round]()
    length = policy.start_sequence(drops=True, max_tokens=len(edit.answer))
    if isinstance(length, PromptReading):
        for begin in range(0, n_prompt - 1, CHUNK):
            n = min(CHUNK, n_prompt - 1 - begin)
            length.observe_prompt(n, NO_LOGITS * float(costs[n]) * PLAIN_SECONDS)
    drafter.prepare(text[:n_prompt])
    size, rule, greedy = len(text) + LONGEST_COPY, Coupled(), Sampling(temperature=0)
    config = Speculation(
        text[:n_prompt], len(edit.answer), size, rule, greedy, SeededStreams(0), None, drafter, length
    )
    loop = speculate(config)
    event = next(loop, None)
    while event is not None:
        answer: Forward | Round
        if isinstance(event, Round):
            answer = replace(event, verify_seconds=float(costs[event.width]) * PLAIN_SECONDS)
            rounds.append(answer)
        else:
            begin, n_positions = len(event.tokens), 1 + len(event.draft)
            right = text[begin : begin + n_positions]
            logits = np.zeros((n_positions, len(known)), np.float32)
            logits[np.arange(len(right)), right] = 1.0
            width = length.width(n_positions) or n_positions
            answer = Forward(logits, 0.0, width, 1, begin - 1, len(rounds))
        try:
            event = loop.send(answer)
        except StopIteration:
            break
    config.close()
    return Played(sum(round_.verify_seconds for round_ in rounds) / PLAIN_SECONDS, tuple(rounds))


@dataclass(frozen=True, slots=True, eq=False)
class WhileRight(FixedLength):
    """A length that knows the answer: stops before the first wrong token."""

    right: TokenArray

    def wants_more(self, draft: Draft) -> bool:
        """Return whether all tokens up to here are right."""
        return len(draft) == n_common(draft.tokens, self.right)


def right_copies(edit: Edit, min_match: int = MIN_MATCH_BESIDE_MODEL) -> list[int]:
    """Return how many tokens of a copy would be accepted at each position of the answer."""
    text, n_prompt = np.concatenate((edit.prompt, edit.answer)), len(edit.prompt)
    drafter = NgramDrafter(min_match)
    drafter.prepare(edit.prompt)
    drafts = (
        drafter.propose(text[:i], WhileRight(LONGEST_COPY, text[i:])) for i in range(n_prompt, len(text))
    )
    return [n_common(draft.tokens, text[n_prompt + i :]) for i, draft in enumerate(drafts)]


def fastest(n_right: Sequence[int], costs: Array) -> Array:
    """Return the least cost of the rest of an answer at each position, [n + 1].

    `n_right` is how many tokens of a copy are right at each of the `n` positions.
    """
    best = np.zeros(len(n_right) + 1)
    for i in range(len(n_right) - 1, -1, -1):
        n = min(n_right[i], len(n_right) - i - 1, LONGEST_COPY)
        best[i] = (costs[1 : n + 2] + best[i + 1 : i + n + 2]).min()
    return best


def losses(played: Played, best: Array) -> tuple[float, float]:
    """Return the cost above `best`: in rounds that rejected a part of a copy, and in all others."""
    lost, begin = [0.0, 0.0], 0
    for round_ in played.rounds:
        end = min(begin + round_.n_accepted + 1, len(best) - 1)
        is_short = round_.n_accepted == len(round_.draft)
        lost[is_short] += round_.verify_seconds / PLAIN_SECONDS + best[end] - best[begin]
        begin = end
    return lost[0], lost[1]


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option(
    "--vocabulary",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A model file whose tokens are used; default: the embedded target.",
)
@click.option(
    "--answers",
    "sets",
    multiple=True,
    type=click.Choice([IDEAL, REAL, HOLD_OUT]),
    default=[IDEAL, REAL, HOLD_OUT],
    help="Only these answers; may be repeated.",
)
@click.option(
    "--curve",
    "curves",
    multiple=True,
    type=click.Choice([*CURVES]),
    default=[*CURVES],
    help="Only this curve of costs; may be repeated.",
)
@click.option("--min-match", default=MIN_MATCH_BESIDE_MODEL, show_default=True,
              help="Tokens of a match; 2 is usual without a draft model.")  # fmt: skip
def main(vocabulary: Path | None, sets: tuple[str, ...], curves: tuple[str, ...], min_match: int) -> None:
    for answers in sets:
        every = edits(vocabulary or demo_target(), answers)
        for name in curves:
            _report(f"{answers}, {name}", every, costs_of(CURVES[name], LONGEST_COPY + 1), min_match)


def _report(name: str, every: Sequence[Edit], costs: Array, min_match: int) -> None:
    shared = AutoLength(sources={Source.NGRAM})
    for edit in every:
        play(edit, costs, shared, min_match)
    columns = "plain | first | later | length | all | rejected | short | rounds | drafted | accepted"
    print(f"\n| {name} | {columns} |\n|---|{10 * '---:|'}")
    sums, rounds = np.zeros(10), list[Round]()
    for edit in every:
        first = play(edit, costs, AutoLength(sources={Source.NGRAM}), min_match)
        later, n = play(edit, costs, shared, min_match), len(edit.answer)
        best = fastest(right_copies(edit, min_match), costs)
        line = (
            n, first.cost, later.cost, best[0], fastest([n] * n, costs)[0], *losses(later, best),
            len(later.rounds), later.n_drafted, later.n_accepted,
        )  # fmt: skip
        sums += line
        rounds += later.rounds
        print(_row(edit.name, line))
    print(_row("all", sums))
    print("\n| width | rounds | drafted | accepted |\n|---|---:|---:|---:|")
    for narrowest, widest in pairwise((0, *WIDTHS)):
        those = [round_ for round_ in rounds if narrowest < 1 + len(round_.draft) <= widest]
        numbers = len(those), sum(len(each.draft) for each in those), sum(each.n_accepted for each in those)
        print(_row(f"to {widest}", numbers))


def _row(name: str, numbers: Sequence[float] | Array) -> str:
    return f"| {name} | {' | '.join(f'{number:.0f}' for number in numbers)} |"


if __name__ == "__main__":
    main()
