"""The drafters of one text: what a pair was opened with, made ready for a prompt, a rule and a constraint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from llamaspec.drafters.fallback import FallbackDrafter
from llamaspec.drafters.foreign import ForeignVocabulary
from llamaspec.drafters.grammar import AllowedDrafter, GrammarDrafter
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.ngram import NgramDrafter
from llamaspec.drafters.past import PastTexts
from llamaspec.drafters.tree import TreeDrafter
from llamaspec.drafters.tree_growth import TreeLength
from llamaspec.engine.row import Clock
from llamaspec.engine.speculate import Closing
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.model import LlamaModel
from llamaspec.protocols import Drafter, RandomStreams, RowConstraint
from llamaspec.sampling.acceptance_rules import RULES, Coupled
from llamaspec.sampling.parameters import Sampling
from llamaspec.stages import Stage, staged_drafter
from llamaspec.values import DRAFT, MTP, Source


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """How the tokens of one text are drawn."""

    sampling: Sampling
    rule: str
    streams: RandomStreams
    n_prompt: int = 0  # tokens that the constraint does not concern
    constraint: RowConstraint | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TextDrafters:
    """Makes drafters for one text after the other."""

    target: LlamaModel
    draft: LlamaModel | None
    stages: Sequence[Stage]
    heads: PredictionHeads | None  # of the target, in place of a draft
    foreign: ForeignVocabulary | None  # of the draft, where it is not the target's
    ngram: bool  # earlier text is copied where it goes on alike, before the draft is asked
    past: PastTexts | None  # texts that are copied from besides
    clock: Clock

    def make(self, drawing: Drawing, trees: TreeLength | None) -> tuple[Drafter, list[Closing]]:
        """All that can draft, the first that has a draft first; and what is closed when the text has ended.

        Parameters
        ----------
        drawing : Drawing
        trees : TreeLength, optional
            Of the text: drafts may branch as it says, where both models and the rule can.
        """
        constraint, n_prompt = drawing.constraint, drawing.n_prompt
        drafters: list[Drafter] = []
        others: list[Closing] = []
        if self.ngram:
            copies = NgramDrafter(past=self.past)
            drafters.append(copies)
            others.append(copies)
        if constraint is not None:
            drafters = [AllowedDrafter(drafter, constraint, n_prompt) for drafter in drafters]
        if self.stages:

            def alone(model: LlamaModel, name: str, streams: RandomStreams) -> ModelDrafter:
                return self._asking(model, replace(drawing, streams=streams), model=name)

            lengths = [stage.length.start_row(drops=RULES[drawing.rule].drops) for stage in self.stages]
            others += lengths
            drafters.append(staged_drafter(self.stages, lengths, alone, drawing.streams, self.clock))
        elif self.draft is not None or self.heads is not None:
            drafters.append(self.asking_model(drawing, trees))
        if constraint is not None:
            drafters.append(GrammarDrafter(constraint, n_prompt))
        return drafters[0] if len(drafters) == 1 else FallbackDrafter(drafters), others

    def asking_model(self, drawing: Drawing, trees: TreeLength | None = None) -> Drafter:
        """The drafter that asks the draft model alone, or the target's prediction heads."""
        if self.heads is None:
            assert self.draft is not None
            kind: Callable[..., ModelDrafter] = ModelDrafter
            if trees and drawing.rule == Coupled.name and self.draft.can_branch and self.target.can_branch:
                kind = partial(TreeDrafter, trees=trees)
            drafter = self._asking(self.draft, drawing, kind=kind)
            return drafter if self.foreign is None else self.foreign.adapted(drafter)
        drafter = self._asking(self.heads, drawing, model=MTP)
        return replace(drafter, source=Source.MTP, longest=self.heads.longest)

    def _asking(
        self,
        asked: LlamaModel | PredictionHeads,
        drawing: Drawing,
        model: str = DRAFT,
        kind: Callable[..., ModelDrafter] = ModelDrafter,
    ) -> ModelDrafter:
        return kind(
            asked.vocabulary_size,
            asked.context_size,
            drawing.sampling,
            RULES[drawing.rule],
            drawing.streams,
            n_tokens=self.target.vocabulary_size,
            model=model,
            n_prompt=drawing.n_prompt,
            constraint=drawing.constraint,
        )
