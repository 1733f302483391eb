"""Drafts that read the target's hidden rows: opening them, and their drafters.

Other modules import this one only for a pair that has such a draft. tests/test_oracles.py.
"""

from __future__ import annotations

from typing import TypeAlias

from llamaspec.drafters.block import BlockDrafter, BlockShape
from llamaspec.drafters.hidden import KEPT_ROWS, HiddenDrafter, RowWindow
from llamaspec.drafters.model import DeferredPrompt, SameTokens
from llamaspec.engine.speculate import Speculation
from llamaspec.llama.block_draft import BlockDraft
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.trial import ensure_pair_tried
from llamaspec.llama.weights import LoadProgress
from llamaspec.plan import DraftPlan, ModelFile
from llamaspec.values import MTP

HiddenDraft: TypeAlias = PredictionHeads | BlockDraft


def open_hidden_draft(
    plan: DraftPlan, file: ModelFile, target: LlamaModel, on_load: LoadProgress | None = None
) -> HiddenDraft:
    """Load the draft that reads the hidden rows of an open target; errors are those of `open_pair`."""
    draft = plan.hidden_draft
    if not plan.has_own_heads:
        ensure_pair_tried(target.path, file.path, target.options.n_ctx, on_load)
    if draft is not None and draft.is_block:
        return BlockDraft(target, draft, file.options, on_load)
    path = None if plan.has_own_heads else file.path
    return PredictionHeads(target, file.options, path, on_load, draft)


def drafter_of(draft: HiddenDraft, target: LlamaModel, config: Speculation) -> HiddenDrafter | BlockDrafter:
    """Return the drafter of a sequence."""
    n_skipped = max(len(config.prompt) - KEPT_ROWS, 0)  # tokens that a draft which waits never sees
    deferred = DeferredPrompt.of(config.length.reading, lambda _: n_skipped, reads_rows=True)
    is_asleep, chance = deferred is not None, (config.sampler, config.rule, config.streams)
    if isinstance(draft, BlockDraft):
        file = draft.file
        shape = BlockShape(
            draft.vocabulary_size, file.block, file.mask, file.from_anchor, file.has_confidence,
            file.n_candidates,
        )  # fmt: skip
        window = RowWindow(MTP, 0, is_asleep=is_asleep)
        return BlockDrafter(shape, window, *chance, MTP, deferred=deferred)
    return HiddenDrafter(
        SameTokens(draft.vocabulary_size, target.vocabulary_size),
        draft.context_size,
        *chance,
        model=MTP,
        source=draft.source,
        longest=draft.longest,
        deferred=deferred,
        row_window=RowWindow(MTP, 1, is_asleep=is_asleep),
    )
