"""Opens a target and what drafts for it, by files or by names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from llamaspec.drafters.common_vocabulary import CommonTokens
from llamaspec.errors import ModelFileError, PairError
from llamaspec.hub import AUTO, has_draft, locate_model, may_have_heads, resolve_draft, resolve_model
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.nextn import check_heads, heads_in_file, what_it_reads
from llamaspec.llama.options import DRAFT_SCORED, MAX_DRAFT, ModelOptions
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.vocabulary import check_pair, difference
from llamaspec.llama.weights import LoadProgress
from llamaspec.pair import Pair
from llamaspec.values import MTP

NGRAM = "ngram"  # in place of a draft: copy from earlier text


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
    ngram: bool | None = None,
    target_options: ModelOptions | None = None,
    draft_options: ModelOptions | None = None,
    cache_ram: int | None = None,
    on_load: LoadProgress | None = None,
) -> Pair:
    """Load a target and, if given, its draft.

    Parameters
    ----------
    target : str or Path
        A file, a name of the list of models, or hf:owner/repo:file.
    draft : str, Path or sequence of them, optional
        The same; "auto" is the draft that is known for the target, or else the target's own prediction
        heads; "mtp" is these heads, "ngram" no model at all. Of several, each drafts for the one before it.
    ngram : bool, optional
        Copy from earlier text where it goes on alike. Default: yes, but where a draft is asked for a fixed
        number of tokens, which nobody weighs against copies.
    cache_ram : int, optional
        Bytes of main memory for finished texts, so that a text that begins like one of them need not be read
        again. Default: a quarter of the free memory, at most 8 GiB; 0 = none.

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
    others: Sequence[str | Path] = ()
    if not isinstance(draft, str | Path | None):
        draft, *others = draft or (None,)
    if others and {draft, *others} & {NGRAM, MTP}:
        raise PairError("a draft has drafts only where all of them are models of their own; drop one")
    if draft == NGRAM:
        draft, ngram = None, True
    if draft == AUTO and not has_draft(str(target)) and may_have_heads(str(target)):
        resolve_model(target)  # it is fetched first, to look for them
    has_heads, head_path = draft == MTP or (draft == AUTO and drafts_itself(target)), None
    draft_path = None if draft is None or has_heads else resolve_draft(draft, target)
    path = resolve_model(target)
    if has_heads:
        check_heads(path)
    elif draft_path is not None and not others and what_it_reads(draft_path):
        has_heads, head_path, draft_path = True, draft_path, None
    places = [] if draft_path is None else [draft_path, *map(resolve_model, others)]
    options = target_options or ModelOptions()
    heads, common, drafts = None, None, list[LlamaModel]()
    with ExitStack() as opened:  # closes what is open where something goes wrong
        options = replace(options, heads=True) if has_heads else options
        store = None if cache_ram is None else PrefixStore(cache_ram)
        target_model = LlamaModel(path, options, on_load, store=store)
        opened.callback(target_model.close)
        if has_heads:
            heads = PredictionHeads(target_model, draft_options, head_path, on_load)
        for place in places:
            opts = draft_options or ModelOptions(max_scored=DRAFT_SCORED)
            if len(drafts) < len(others):  # it verifies a draft of its own
                opts = replace(opts, max_scored=MAX_DRAFT + 1)
            opts = replace(opts, reads_apart=False)  # a draft is small: a second context gains little
            drafts.append(LlamaModel(place, opts, on_load, store=target_model.store))
            opened.callback(drafts[-1].close)
            if others:
                check_pair(target_model.vocabulary, drafts[-1].vocabulary)
        if drafts and difference(target_model.vocabulary, drafts[0].vocabulary) is not None:
            common = CommonTokens(target_model.vocabulary, drafts[0].vocabulary)
        opened.pop_all()
    first, *below = drafts or (None,)
    seconds = time.perf_counter() - start
    return Pair(
        target_model, first, seconds, cascade=below, heads=heads, common=common, ngram=ngram,
        owns_models=True,
    )  # fmt: skip


def drafts_itself(target: str | Path) -> bool:
    """Whether "auto" means a target's own prediction heads: no draft is known, and the file is here."""
    if has_draft(str(target)):
        return False
    try:
        return heads_in_file(locate_model(target)).fault is None
    except ModelFileError:
        return False  # what is wrong is said by whoever needs the file
