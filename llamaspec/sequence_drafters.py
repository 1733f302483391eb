"""The drafters of each sequence, made from the loaded models of a pair.

A sequence may copy from earlier text, ask a draft model or the target's prediction heads, and take over
tokens that its constraint forces. tests/test_cascades.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llamaspec.drafters.cascade import CascadeDrafter
from llamaspec.drafters.common_vocabulary import CommonTokens, SameTokens
from llamaspec.drafters.earlier import ScopedAnswers
from llamaspec.drafters.fallback import FallbackDrafter, ForcedDrafter
from llamaspec.drafters.model import DeferredPrompt, ModelDrafter, TreeDrafter
from llamaspec.drafters.ngram import MIN_MATCH, MIN_MATCH_BESIDE_MODEL, NgramDrafter
from llamaspec.engine.speculate import Speculation
from llamaspec.length.policy import AutoLength
from llamaspec.length.tree import TreeLength
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.vocabulary import difference
from llamaspec.protocols import Drafter, LengthPolicy
from llamaspec.sampling.acceptance_rules import Coupled
from llamaspec.sampling.random_streams import CascadeStreams
from llamaspec.values import DRAFT, MTP, NO_TOKENS, Copying, Source, TokenArray


@dataclass(eq=False, slots=True)
class Stage:
    """A draft model that has a draft of its own."""

    models: Sequence[LlamaModel]  # itself, its draft, the draft of that, and so on
    sources: frozenset[Source]  # of the tokens that it verifies
    length: LengthPolicy  # how many of them to draft, for all sequences


def draft_name(level: int) -> str:
    """Return the name of a draft model in requests; level 0 drafts for the target."""
    return DRAFT if level == 0 else f"{DRAFT}-{level + 1}"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceDrafters:
    """Makes the drafters of each sequence of a pair."""

    target: LlamaModel
    drafts: Sequence[LlamaModel]  # the first drafts for the target, each other one for the previous one
    stages: Sequence[Stage]  # of each draft model but the last
    heads: PredictionHeads | None  # the target's, instead of a draft model
    common: CommonTokens | None  # if the draft model has another vocabulary
    copying: Copying

    @classmethod
    def of(
        cls,
        target: LlamaModel,
        drafts: Sequence[LlamaModel],
        heads: PredictionHeads | None,
        copying: Copying,
    ) -> SequenceDrafters:
        """Connect the models of a pair. Copies that are asked for come first in every stage, too."""
        stages = []
        for i in range(len(drafts) - 1):
            model = Source.MODEL if i == len(drafts) - 2 else Source.STAGE
            sources = frozenset({model, Source.NGRAM} if copying is Copying.ON else {model})
            stages.append(Stage(drafts[i:], sources, AutoLength(sources=sources)))
        common = None
        if drafts and difference(target.vocabulary, drafts[0].vocabulary) is not None:
            common = CommonTokens(target.vocabulary, drafts[0].vocabulary)
        return cls(target, drafts, stages, heads, common, copying)

    @property
    def sources(self) -> frozenset[Source]:
        """Where draft tokens come from."""
        found = {
            Source.STAGE if self.stages else Source.MODEL: bool(self.drafts),
            Source.MTP: self.heads is not None,
            Source.NGRAM: self.copying is not Copying.OFF,
            Source.EARLIER: self.copying is not Copying.OFF,
        }
        return frozenset(source for source, drafts in found.items() if drafts)

    def make(
        self,
        config: Speculation,
        prediction: TokenArray = NO_TOKENS,
        *,
        copies: bool = True,
        earlier: ScopedAnswers | None = None,
    ) -> Drafter:
        """Return the drafter of a sequence, made of everything that can draft for it.

        Drafts are trees if the length policy, both models and the rule allow it. Draft tokens are copied
        from `prediction`, and unless `copies` is false from earlier text: of the sequence itself, and of the
        answers in `earlier`.
        """
        drafters: list[Drafter] = []
        copying = self.copying if copies else Copying.OFF
        has_model = bool(self.drafts) or self.heads is not None
        is_weighed = copying is Copying.WEIGHED and has_model
        if is_weighed:  # only a policy that knows costs can compare copies with the model's tokens
            copies = config.length.reading is not None
        else:
            copies = copying is not Copying.OFF
        if copies or len(prediction):
            least = MIN_MATCH_BESIDE_MODEL if is_weighed else MIN_MATCH
            is_end = self.target.vocabulary.is_end
            answers = earlier if copies else None
            drafters.append(NgramDrafter(least, prediction=prediction, earlier=answers, is_end=is_end))
        if self.stages:
            drafters.append(self._cascaded(config))
        elif has_model:
            drafters.append(self.asking_model(config))
        if config.constraint is not None:
            drafters.append(ForcedDrafter(config.constraint, len(config.prompt)))
        return drafters[0] if len(drafters) == 1 else FallbackDrafter(drafters)

    def asking_model(self, config: Speculation) -> ModelDrafter:
        """Return the drafter that uses only the draft model, or the target's prediction heads."""
        if self.heads is not None:
            return self._asking(self.heads, config, MTP, source=Source.MTP, longest=self.heads.longest)
        draft, length = self.drafts[0], config.length
        deferred = None if length.reading is None else DeferredPrompt(length.reading, draft.n_cached)
        kind: Callable[..., ModelDrafter] = ModelDrafter
        if isinstance(length, TreeLength) and self._can_have_trees(config):
            kind = partial(TreeDrafter, trees=length)
        return self._asking(draft, config, kind=kind, deferred=deferred)

    def _can_have_trees(self, config: Speculation) -> bool:
        has_states = self.target.keeps_states or self.drafts[0].keeps_states  # a state has one branch
        is_unrestricted = self.common is None and config.constraint is None
        return config.rule.name == Coupled.name and is_unrestricted and not has_states

    def _cascaded(self, config: Speculation, level: int = 0) -> Drafter:
        """Return the drafter of a draft model, with everything that drafts for it."""
        model = self._asking(self.drafts[level], config, draft_name(level))
        if level == len(self.stages):
            return model
        stage, streams = self.stages[level], CascadeStreams(config.streams)
        helper = self._cascaded(replace(config, streams=streams), level + 1)
        if Source.NGRAM in stage.sources:
            copies = NgramDrafter(is_end=self.target.vocabulary.is_end)
            helper = FallbackDrafter([copies, helper])
        length = stage.length.start_sequence(drops=config.rule.drops)
        return CascadeDrafter(model, helper, length, streams, self.drafts[level].max_scored)

    def _asking(
        self,
        asked: LlamaModel | PredictionHeads,
        config: Speculation,
        name: str = DRAFT,
        *,
        kind: Callable[..., ModelDrafter] = ModelDrafter,
        **settings: Any,
    ) -> ModelDrafter:
        tokens = self.common or SameTokens(asked.vocabulary_size, self.target.vocabulary_size)
        size, sampler = asked.context_size, config.sampler
        return kind(tokens, size, sampler, config.rule, config.streams, model=name, **settings)
