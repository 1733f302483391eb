"""Measures a draft model with its target on this machine: acceptance, cost and speed-up.

Under the coupled rule, a draft token is accepted if draft and target draw the same token with the same noise.
So one evaluation of the target's completions by the draft model shows the acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from llamaspec.engine.completion import Completion
from llamaspec.errors import PromptError
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import DRAFT_SCORED, ModelOptions
from llamaspec.measure.compare import Task
from llamaspec.measure.probe import STEPS, TEXT, measure
from llamaspec.measure.turns import Spread, take_turns
from llamaspec.pair import Pair
from llamaspec.protocols import Stream
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import TARGET, Forward, ForwardRequest, TokenArray

N_PROMPTS, PROMPT = 4, 64  # prompts; tokens of each
WRITTEN, LEAST_WRITTEN = 128, 16  # maximum and minimum tokens of each completion
WRITING = 60.0  # seconds for the completions; measuring the speed-up takes six times as long
N_RUNS = 2  # runs per prompt, to measure a speed-up


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """Settings for measuring draft models."""

    texts: tuple[bytes, ...] = ()  # samples from the user; none = a built-in text
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 1

    def prompts(self, target: LlamaModel) -> list[TokenArray]:
        """Return prompts from all texts, evenly spaced; PromptError if the texts are too short."""
        vocabulary, room = target.vocabulary, max(2, target.context_size - LEAST_WRITTEN)
        length = min(PROMPT, room)
        texts = self.texts or (TEXT.encode(),)
        joined = np.concatenate([vocabulary.tokenize(text, add_special=False) for text in texts])
        if len(joined) < 2:
            raise PromptError("the texts are too short; give some pages of typical text with --text")
        starts = np.unique(np.linspace(0, max(0, len(joined) - length), N_PROMPTS).astype(int))
        return [vocabulary.begun(joined[start : start + length]) for start in starts]

    def tasks(self, prompts: Sequence[TokenArray], token_seconds: float) -> list[Task]:
        """Return the completions to generate: as long as their time allows."""
        affordable = int(WRITING / (token_seconds * len(prompts)))
        n = min(WRITTEN, max(LEAST_WRITTEN, affordable))
        return [Task(prompt, self.sampling, self.seed, n, DEFAULT_RULE) for prompt in prompts]


@dataclass(frozen=True, slots=True, eq=False)
class TargetSequence:
    """A prompt and its completion by the target."""

    tokens: TokenArray  # [n_prompt + n]
    n_prompt: int


def complete_prompts(target: LlamaModel, tasks: Sequence[Task]) -> list[TargetSequence]:
    """Generate completions; PromptError if all are empty."""
    sequences = []
    with Pair(target) as pair:
        for task in tasks:
            tokens = np.array(task.run_plain(pair).tokens, dtype=np.int32)
            if len(tokens):
                sequences.append(TargetSequence(np.concatenate([task.prompt, tokens]), len(task.prompt)))
    if not sequences:
        raise PromptError("the target generates nothing after these texts; give others with --text")
    return sequences


def acceptance(draft: LlamaModel, sequences: Sequence[TargetSequence], settings: TrialSettings) -> float:
    """Return the share of the target's tokens that the draft would have drawn; clears its KV cache."""
    with Pair(draft) as pair:
        n_agreed = 0
        for sequence in sequences:
            pair.forget()
            n_agreed += pair.run(_agreeing(draft, sequence, settings))
        pair.forget()
    return n_agreed / sum(len(sequence.tokens) - sequence.n_prompt for sequence in sequences)


def _agreeing(
    draft: LlamaModel, sequence: TargetSequence, settings: TrialSettings
) -> Generator[ForwardRequest, Forward, int]:
    """Count the target's tokens in a sequence that the draft would have drawn."""
    tokens, n_agreed = sequence.tokens, 0
    streams, sampler = SeededStreams(settings.seed), Sampler(settings.sampling, sequence.n_prompt)
    for start in range(sequence.n_prompt, len(tokens), draft.max_scored):
        end = min(start + draft.max_scored, len(tokens))
        begin = max(0, end - 1 - draft.context_size)
        forward = yield ForwardRequest(TARGET, tokens[begin : end - 1], end - start)
        for position, logits in zip(range(start, end), forward.logits, strict=True):
            if np.isfinite(logits.max()):
                q = sampler.distribution(logits, tokens[:position])
                n_agreed += int(streams.choose(q, Stream.TOKEN, position) == tokens[position])
    return n_agreed


class Machine:
    """Measures costs on this machine. Tests use a fake without a clock."""

    def token_seconds(self, target: LlamaModel) -> float:
        """Return the target's seconds for a token."""
        with Pair(target) as pair:
            return measure(pair, STEPS).widths[0].timings[0].median

    def step_ratio(self, target: LlamaModel, draft: LlamaModel) -> float:
        """Return seconds of a draft step / seconds of a target token, measured in turns.

        These are low quartiles, because other programs can only add time.
        """
        with Pair(target, draft) as pair:
            found = measure(pair, STEPS)
        assert found.draft_step is not None
        return found.draft_step.low / found.widths[0].timings[0].low

    def speed_up(self, target: LlamaModel, draft_file: Path, tasks: Sequence[Task]) -> Spread:
        """Measure the speed-up over plain decoding, in turns, several times per prompt."""
        with LlamaModel(draft_file, draft_options(target)) as draft, Pair(target, draft) as pair:

            def speed(run: Callable[[Task], Completion], turn: int) -> float | None:
                pair.forget()
                return run(tasks[turn % len(tasks)]).summary.tokens_per_second

            plain = partial(speed, lambda task: task.run_plain(pair))
            drafted = partial(speed, lambda task: task.run(pair))
            found = take_turns({"plain": plain, "drafted": drafted}, N_RUNS * len(tasks))
        pairs = zip(found["drafted"], found["plain"], strict=True)
        return Spread.of(mine / alone for mine, alone in pairs if mine and alone)


def draft_options(target: LlamaModel) -> ModelOptions:
    """Return options that load a draft model like its target."""
    options = target.options
    return ModelOptions(
        n_ctx=options.n_ctx,
        gpu_layers=options.gpu_layers,
        threads=options.threads,
        kernels=options.kernels,
        max_scored=DRAFT_SCORED,
    )


class Trial:
    """A target, its costs and its completions, with which any number of draft models are measured.

    PromptError if the texts of the settings are too short, or the target generates nothing after them.
    """

    def __init__(self, target: LlamaModel, settings: TrialSettings, machine: Machine | None = None) -> None:
        self.target = target
        self._settings, self._machine = settings, machine or Machine()
        prompts = settings.prompts(target)
        self._tasks = settings.tasks(prompts, self._machine.token_seconds(target))

    def cost_and_acceptance(self, draft_file: Path) -> tuple[float, float]:
        """Return seconds of a draft step / seconds of a target token, and the acceptance."""
        sequences = complete_prompts(self.target, self._tasks)
        with LlamaModel(draft_file, draft_options(self.target)) as draft:
            accepted = acceptance(draft, sequences, self._settings)
            return self._machine.step_ratio(self.target, draft), accepted

    def speed_up(self, draft_file: Path) -> Spread:
        """Measure the speed-up by a draft model."""
        return self._machine.speed_up(self.target, draft_file, self._tasks)
