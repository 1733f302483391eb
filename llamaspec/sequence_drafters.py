"""The drafters of one sequence, made from the models of a pair for a rule, a sampling and a constraint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamaspec.drafters.cascade import CascadeDrafter
from llamaspec.drafters.common_vocabulary import CommonTokens
from llamaspec.drafters.fallback import FallbackDrafter, ForcedDrafter
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.ngram import MIN_MATCH, MIN_MATCH_BESIDE_MODEL, NgramDrafter
from llamaspec.drafters.tree import TreeDrafter, TreeLength
from llamaspec.length.fixed import prompt_reading
from llamaspec.length.policy import AutoLength
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.model import LlamaModel
from llamaspec.protocols import Drafter, LengthPolicy, RandomStreams, Rule, SequenceConstraint, SequenceLength
from llamaspec.sampling.acceptance_rules import Coupled
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import CascadeStreams
from llamaspec.values import DRAFT, MTP, NO_TOKENS, Copying, Source, TokenArray


@dataclass(eq=False, slots=True)
class Stage:
    """A draft model that has a draft of its own."""

    models: Sequence[LlamaModel]  # itself, its draft, the draft of that, and so on
    sources: frozenset[Source]  # of the tokens that it verifies
    length: LengthPolicy  # how many of them to draft, for all sequences


def stages_of(drafts: Sequence[LlamaModel], *, copies: bool = False) -> tuple[Stage, ...]:
    """The stages of a chain of draft models: each drafts for the previous one, the first for the target.

    With `copies`, a stage verifies copies of earlier text before it asks its draft.
    """
    stages = []
    for i in range(len(drafts) - 1):
        model = Source.MODEL if i == len(drafts) - 2 else Source.STAGE
        sources = frozenset({model, Source.NGRAM} if copies else {model})
        stages.append(Stage(drafts[i:], sources, AutoLength(sources=sources)))
    return tuple(stages)


def draft_name(level: int) -> str:
    """The name of a draft in requests; level 0 is the target's."""
    return DRAFT if level == 0 else f"{DRAFT}-{level + 1}"


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """How the tokens of one sequence are sampled."""

    sampling: Sampling
    rule: Rule
    streams: RandomStreams
    n_prompt: int = 0  # tokens that the constraint does not apply to
    constraint: SequenceConstraint | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SequenceDrafters:
    """Makes the drafters of each sequence of a pair."""

    target: LlamaModel
    draft: LlamaModel | None
    stages: Sequence[Stage]
    heads: PredictionHeads | None  # the target's, in place of a draft
    common: CommonTokens | None  # if the draft's vocabulary is not the target's
    copying: Copying

    def make(self, drawing: Drawing, length: SequenceLength, prediction: TokenArray = NO_TOKENS) -> Drafter:
        """Everything that can draft for a sequence; `length` decides how much.

        Drafts are trees if `length`, both models and the rule allow it. `prediction` is another text to copy
        from.
        """
        drafters: list[Drafter] = []
        has_model = self.draft is not None or self.heads is not None
        is_weighed = self.copying is Copying.WEIGHED and has_model
        copies = prompt_reading(length) is not None if is_weighed else self.copying is not Copying.OFF
        if copies or len(prediction):
            least = MIN_MATCH_BESIDE_MODEL if is_weighed else MIN_MATCH
            is_end = self.target.vocabulary.is_end
            drafters.append(NgramDrafter(least, prediction=prediction, is_end=is_end))
        if self.stages:
            drafters.append(self._cascaded(drawing))
        elif has_model:
            drafters.append(self.asking_model(drawing, length))
        if drawing.constraint is not None:
            drafters.append(ForcedDrafter(drawing.constraint, drawing.n_prompt))
        return drafters[0] if len(drafters) == 1 else FallbackDrafter(drafters)

    def asking_model(self, drawing: Drawing, length: SequenceLength | None = None) -> ModelDrafter:
        """The drafter that uses only the draft model, or the target's prediction heads."""
        if self.heads is not None:
            return self._asking(self.heads, drawing, MTP, source=Source.MTP, longest=self.heads.longest)
        assert self.draft is not None
        if length is None:
            return self._asking(self.draft, drawing)
        reading: dict[str, Any] = {"reading": prompt_reading(length), "n_cached": self.draft.n_cached}
        keeps_states = self.target.keeps_states or self.draft.keeps_states  # of one branch only
        if isinstance(length, TreeLength) and drawing.rule.name == Coupled.name and not keeps_states:
            return self._asking(self.draft, drawing, kind=TreeDrafter, trees=length, **reading)
        return self._asking(self.draft, drawing, **reading)

    def _cascaded(self, drawing: Drawing, level: int = 0) -> Drafter:
        """The drafter of a draft model, with everything that drafts for it."""
        if level == len(self.stages):
            return self._asking(self.stages[-1].models[1], drawing, draft_name(level))
        here, streams = self.stages[level], CascadeStreams(drawing.streams)
        model = self._asking(here.models[0], drawing, draft_name(level))
        helper = self._cascaded(replace(drawing, streams=streams), level + 1)
        if Source.NGRAM in here.sources:
            copies = NgramDrafter(is_end=self.target.vocabulary.is_end)
            helper = FallbackDrafter([copies, helper])
        length = here.length.start_sequence(drops=drawing.rule.drops)
        return CascadeDrafter(model, helper, length, streams, here.models[0].max_scored)

    def _asking(
        self,
        asked: LlamaModel | PredictionHeads,
        drawing: Drawing,
        name: str = DRAFT,
        *,
        kind: type[ModelDrafter] = ModelDrafter,
        **settings: Any,
    ) -> ModelDrafter:
        return kind(
            asked.vocabulary_size,
            asked.context_size,
            drawing.sampling,
            drawing.rule,
            drawing.streams,
            n_tokens=self.target.vocabulary_size,
            model=name,
            tokens=self.common,
            n_prompt=drawing.n_prompt,
            constraint=drawing.constraint,
            **settings,
        )
