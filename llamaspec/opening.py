"""Opens a target and what drafts for it, by files or by names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from llamaspec.drafters.common_vocabulary import CommonTokens
from llamaspec.drafters.ngram import PastTexts
from llamaspec.errors import ModelFileError, PairError
from llamaspec.hub import AUTO, has_draft, locate_model, may_have_heads, resolve_draft, resolve_model
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.nextn import check_heads, heads_in_file, what_it_reads
from llamaspec.llama.options import DRAFT_SCORED, MAX_DRAFT, ModelOptions
from llamaspec.llama.vocabulary import check_pair, difference
from llamaspec.llama.weights import LoadProgress
from llamaspec.pair import Pair
from llamaspec.values import MTP

NGRAM = "ngram"  # in place of a draft: copy from earlier text
_DRAFT_OPTIONS = ModelOptions(max_scored=DRAFT_SCORED)


def demo_target() -> Path:
    """The embedded target model."""
    return Path(str(files("llamaspec") / "demo" / "target.gguf"))


def demo_draft() -> Path:
    """The embedded draft model, distilled from the embedded target."""
    return Path(str(files("llamaspec") / "demo" / "draft.gguf"))


def open_pair(
    target: str | Path,
    draft: str | Path | Sequence[str | Path] | None = None,
    *,
    ngram: bool = False,
    past: PastTexts | None = None,
    target_options: ModelOptions | None = None,
    draft_options: ModelOptions | None = None,
    on_load: LoadProgress | None = None,
) -> Pair:
    """Load a target and, if given, its draft.

    Parameters
    ----------
    target : str or Path
        A file, or a name as the commands take it: of the list of models, or hf:owner/repo:file.
    draft : str, Path or sequence of them, optional
        The same; "auto" is the draft that is known for the target, or else the target's own prediction
        heads; "mtp" is these heads, "ngram" no model at all. Of several, each drafts for the one before it.
    ngram : bool
        Copy from earlier text where it goes on alike; the draft, if any, is asked elsewhere.
    past : PastTexts, optional
        Earlier texts of this target that may be copied from, too.

    Raises
    ------
    ModelFileError, MemoryFullError
        A model cannot be found or loaded.
    PairError
        The draft's vocabulary has too little in common with the target's, or differs where a draft has a
        draft; or the target has no prediction heads.

    Examples
    --------
    >>> with open_pair(demo_target(), demo_draft()) as pair:  # doctest: +SKIP
    ...     for piece in pair.stream("import os", sampling=Sampling(temperature=0.7), seed=7):
    ...         print(piece.text, end="")
    """
    start = time.perf_counter()

    def open_with_heads(path: Path, head_path: Path | None) -> Pair:
        options = target_options or ModelOptions()
        return _open_with_heads(path, head_path, options, draft_options, on_load, start, past, ngram=ngram)

    others: Sequence[str | Path] = ()
    if not isinstance(draft, str | Path | None):
        draft, *others = draft or (None,)
    if others and {draft, *others} & {NGRAM, MTP}:
        raise PairError("a draft has drafts only where all of them are models of their own; drop one")
    if draft == NGRAM:
        draft, ngram = None, True
    if draft == AUTO and not has_draft(str(target)) and may_have_heads(str(target)):
        resolve_model(target)  # it is fetched first, to look for them
    if draft == MTP or (draft == AUTO and drafts_itself(target)):
        return open_with_heads(resolve_model(target), None)
    draft_path = None if draft is None else resolve_draft(draft, target)
    if draft_path is not None and not others and what_it_reads(draft_path):
        return open_with_heads(resolve_model(target), draft_path)
    path, options = resolve_model(target), draft_options or _DRAFT_OPTIONS
    places = [] if draft_path is None else [draft_path, *map(resolve_model, others)]
    with ExitStack() as opened:  # closes what is open where something goes wrong
        target_model = LlamaModel(path, target_options, on_load)
        opened.callback(target_model.close)
        drafts: list[LlamaModel] = []
        for place in places:
            verifies = len(drafts) < len(others)  # a draft of its own
            opts = replace(options, max_scored=MAX_DRAFT + 1) if verifies else options
            drafts.append(LlamaModel(place, opts, on_load))
            opened.callback(drafts[-1].close)
            if others:
                check_pair(target_model.vocabulary, drafts[-1].vocabulary)
        common = None
        if drafts and difference(target_model.vocabulary, drafts[0].vocabulary) is not None:
            common = CommonTokens(target_model.vocabulary, drafts[0].vocabulary)
        opened.pop_all()
    first, *below = drafts or (None,)
    seconds = time.perf_counter() - start
    return Pair(target_model, first, seconds, cascade=below, common=common, ngram=ngram, past=past)


def drafts_itself(target: str | Path) -> bool:
    """Whether "auto" means a target's own prediction heads: no draft is known, and the file is here."""
    if has_draft(str(target)):
        return False
    try:
        return heads_in_file(locate_model(target)).fault is None
    except ModelFileError:
        return False  # what is wrong is said by whoever needs the file


def _open_with_heads(
    path: Path,
    head_path: Path | None,
    target_options: ModelOptions,
    head_options: ModelOptions | None,
    on_load: LoadProgress | None,
    start: float,
    past: PastTexts | None,
    *,
    ngram: bool,
) -> Pair:
    """Load a target whose own prediction heads draft, or one that lies in a file of its own."""
    if head_path is None:
        check_heads(path)
    target = LlamaModel(path, replace(target_options, heads=True), on_load)
    try:
        heads = PredictionHeads(target, head_options, head_path, on_load)
    except BaseException:
        target.close()
        raise
    return Pair(target, None, time.perf_counter() - start, heads=heads, ngram=ngram, past=past)
