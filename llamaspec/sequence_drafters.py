"""The drafters of each sequence, made from the loaded models of a pair.

A sequence may copy from earlier text, ask a draft model or the target's prediction heads, and take over
tokens that its constraint forces. tests/test_oracles.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llamaspec.drafters.fallback import FallbackDrafter, ForcedDrafter
from llamaspec.drafters.model import DeferredPrompt, ModelDrafter, SameTokens
from llamaspec.drafters.ngram import MIN_MATCH, MIN_MATCH_BESIDE_MODEL, NgramDrafter
from llamaspec.engine.speculate import Speculation
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.vocabulary import difference
from llamaspec.protocols import Drafter
from llamaspec.values import NO_TOKENS, Copying, Source, TokenArray

if TYPE_CHECKING:
    from llamaspec.drafters.common_vocabulary import CommonTokens
    from llamaspec.drafters.earlier import ScopedAnswers
    from llamaspec.hidden_drafts import HiddenDraft


@dataclass(frozen=True, slots=True, eq=False)
class SequenceDrafters:
    """Makes the drafters of each sequence of a pair."""

    target: LlamaModel
    draft: LlamaModel | None
    heads: HiddenDraft | None  # they read hidden rows; instead of a draft model
    common: CommonTokens | None  # if the draft model has another vocabulary
    copying: Copying

    @classmethod
    def of(
        cls,
        target: LlamaModel,
        draft: LlamaModel | None,
        heads: HiddenDraft | None,
        copying: Copying,
    ) -> SequenceDrafters:
        """Connect the models of a pair."""
        common = None
        if draft is not None and difference(target.vocabulary, draft.vocabulary) is not None:
            from llamaspec.drafters.common_vocabulary import CommonTokens

            common = CommonTokens(target.vocabulary, draft.vocabulary)
        return cls(target, draft, heads, common, copying)

    @property
    def sources(self) -> frozenset[Source]:
        """Where draft tokens come from."""
        found = {
            Source.MODEL: self.draft is not None,
            Source.MTP if self.heads is None else self.heads.source: self.heads is not None,
            Source.NGRAM: self.copying is not Copying.OFF,
            Source.EARLIER: self.copying is not Copying.OFF,
        }
        return frozenset(source for source, is_used in found.items() if is_used)

    def make(
        self,
        config: Speculation,
        prediction: TokenArray = NO_TOKENS,
        *,
        copies: bool = True,
        earlier: ScopedAnswers | None = None,
    ) -> Drafter:
        """Return the drafter of a sequence, made of everything that can draft for it.

        Draft tokens are copied from `prediction`, and unless `copies` is false from earlier text: of the
        sequence itself, and of the answers in `earlier`.
        """
        drafters: list[Drafter] = []
        copying = self.copying if copies else Copying.OFF
        has_model = self.draft is not None or self.heads is not None
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
        if has_model:
            drafters.append(self.asking_model(config))
        if config.constraint is not None:
            drafters.append(ForcedDrafter(config.constraint, len(config.prompt)))
        return drafters[0] if len(drafters) == 1 else FallbackDrafter(drafters)

    def asking_model(self, config: Speculation) -> Drafter:
        """Return the drafter that uses only the draft model, or the draft with hidden rows."""
        if self.heads is not None:
            from llamaspec.hidden_drafts import drafter_of

            return drafter_of(self.heads, self.target, config)
        draft = self.draft
        assert draft is not None
        tokens = self.common or SameTokens(draft.vocabulary_size, self.target.vocabulary_size)
        deferred = DeferredPrompt.of(config.length.reading, partial(draft.n_cached, scope=config.scope))
        chance = config.sampler, config.rule, config.streams
        return ModelDrafter(tokens, draft.context_size, *chance, deferred=deferred)
