"""Drafts of drafts: which models they are, and the drafter that asks them all.

Every stage has a length policy of its own, which learns over all texts whether help for its draft pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamaspec.drafters.fallback import FallbackDrafter
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.ngram import NgramDrafter
from llamaspec.drafters.past import PastTexts
from llamaspec.engine.row import Clock
from llamaspec.engine.staged import StagedDrafter
from llamaspec.length.auto_length import AutoLength
from llamaspec.llama.model import LlamaModel
from llamaspec.protocols import Drafter, LengthPolicy, RandomStreams, RowLength
from llamaspec.sampling.random_streams import StageStreams
from llamaspec.values import DRAFT, Source


@dataclass(eq=False, slots=True)
class Stage:
    """A draft and the model that drafts for it: a pair of its own to whoever keeps what was learnt."""

    target: LlamaModel
    draft_models: Sequence[LlamaModel]  # its draft, and whatever drafts for that
    past: PastTexts | None = None  # is copied from, too
    ngram: bool = False  # earlier text is copied before the draft is asked
    heads: None = None
    length: LengthPolicy = field(init=False)

    def __post_init__(self) -> None:
        self.length = AutoLength(sources=self.sources)

    @property
    def is_last(self) -> bool:
        """Whether nobody drafts for its draft."""
        return len(self.draft_models) == 1

    @property
    def sources(self) -> frozenset[Source]:
        """Who drafts for it."""
        model = Source.MODEL if self.is_last else Source.STAGE
        copies = {Source.NGRAM} if self.past is None else {Source.NGRAM, Source.STORE}
        return frozenset({model, *copies} if self.ngram else {model})


def stages_of(
    draft: LlamaModel, more: Sequence[LlamaModel], past: PastTexts | None, *, ngram: bool
) -> tuple[Stage, ...]:
    """Each of `more` drafts for the one before it, the first for the draft."""
    chain = [draft, *more]
    return tuple(Stage(model, chain[i + 1 :], past, ngram) for i, model in enumerate(chain[:-1]))


def draft_name(level: int) -> str:
    """The name of a draft in requests; level 0 is the target's."""
    return DRAFT if level == 0 else f"{DRAFT}-{level + 1}"


def staged_drafter(
    stages: Sequence[Stage],
    lengths: Sequence[RowLength],
    alone: Callable[[LlamaModel, str, RandomStreams], ModelDrafter],
    streams: RandomStreams,
    clock: Clock,
    level: int = 0,
) -> Drafter:
    """The drafter of the first stage's draft.

    Parameters
    ----------
    lengths : sequence of RowLength
        One text's share of each stage's policy.
    alone : callable
        Makes the drafter that asks one model alone: from the model, its name, and the chance of its draft.
    """
    stage, own = stages[level], StageStreams(streams)
    drafter = alone(stage.target, draft_name(level), streams)
    helper: Drafter
    if stage.is_last:
        helper = alone(stage.draft_models[0], draft_name(level + 1), own)
    else:
        helper = staged_drafter(stages, lengths, alone, own, clock, level + 1)
    if stage.ngram:
        helper = FallbackDrafter([NgramDrafter(past=stage.past), helper])
    return StagedDrafter(drafter, helper, lengths[level], own, clock, stage.target.max_scored)
