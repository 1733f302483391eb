"""Opens a target and what drafts for it, by files or by names."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from llamaspec.errors import ModelFileError
from llamaspec.hub.names import AUTO, has_draft, locate_model, resolve_draft, resolve_model
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.nextn import check_heads, heads_in_file
from llamaspec.llama.options import DRAFT_SCORED, ModelOptions
from llamaspec.llama.pairing import check_pair
from llamaspec.llama.shared_head import is_shared_head
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
    draft: str | Path | None = None,
    *,
    ngram: bool = False,
    target_options: ModelOptions | None = None,
    draft_options: ModelOptions | None = None,
    on_load: LoadProgress | None = None,
) -> Pair:
    """Load a target and, if given, its draft.

    Parameters
    ----------
    target : str or Path
        A file, or a name as the commands take it: of the list of models, or hf:owner/repo:file.
    draft : str or Path, optional
        The same; "auto" is the draft that is known for the target, or else the target's own prediction
        heads; "mtp" is these heads, "ngram" no model at all.
    ngram : bool
        Copy from earlier text where it goes on alike; the draft, if any, is asked elsewhere.

    Raises
    ------
    ModelFileError, MemoryFullError
        A model cannot be found or loaded.
    PairError
        The two models number tokens differently, or the target has no prediction heads.

    Examples
    --------
    >>> with open_pair(demo_target(), demo_draft()) as pair:  # doctest: +SKIP
    ...     for piece in pair.stream("import os", sampling=Sampling(temperature=0.7), seed=7):
    ...         print(piece.text, end="")
    """
    start = time.perf_counter()
    if draft == NGRAM:
        draft, ngram = None, True
    if draft == MTP or (draft == AUTO and drafts_itself(target)):
        path = resolve_model(target)
        return _open_with_heads(path, None, target_options, draft_options, on_load, start, ngram=ngram)
    draft_path = None if draft is None else resolve_draft(draft, target)
    if draft_path is not None and is_shared_head(draft_path):
        path = resolve_model(target)
        return _open_with_heads(path, draft_path, target_options, draft_options, on_load, start, ngram=ngram)
    with ExitStack() as opened:  # closes what is open where something goes wrong
        target_model = LlamaModel(resolve_model(target), target_options, on_load)
        opened.callback(target_model.close)
        draft_model = None
        if draft_path is not None:
            draft_model = LlamaModel(draft_path, draft_options or _DRAFT_OPTIONS, on_load)
            opened.callback(draft_model.close)
            check_pair(target_model.vocabulary, draft_model.vocabulary)
        opened.pop_all()
    return Pair(target_model, draft_model, time.perf_counter() - start, ngram=ngram)


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
    target_options: ModelOptions | None,
    head_options: ModelOptions | None,
    on_load: LoadProgress | None,
    start: float,
    *,
    ngram: bool,
) -> Pair:
    """Load a target whose own prediction heads draft, or one that lies in a file of its own."""
    if head_path is None:
        check_heads(path)
    target = LlamaModel(path, replace(target_options or ModelOptions(), heads=True), on_load)
    try:
        heads = PredictionHeads(target, head_options, head_path, on_load)
    except BaseException:
        target.close()
        raise
    return Pair(target, None, time.perf_counter() - start, heads=heads, ngram=ngram)
