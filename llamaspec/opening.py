"""Load a target and its drafts: from files or names, or from a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path

from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.vocabulary import check_pair
from llamaspec.llama.weights import LoadProgress
from llamaspec.pair import Pair
from llamaspec.plan import DraftPlan, make_plan
from llamaspec.values import Copying


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
        A file, a name from the list of models, or hf:owner/repo:file.
    draft : str, Path or sequence of them, optional
        The same; "auto" is the draft known for the target, or else the target's own prediction heads; "mtp"
        is these heads, "ngram" no model at all. Of several, each drafts for the previous one.
    ngram : bool, optional
        Copy draft tokens from earlier text. Default: yes, except beside a draft model with a fixed draft
        length, where nothing compares copies with the model's tokens.
    cache_ram : int, optional
        Bytes of main memory for the KV caches of finished sequences, so that a prompt with the same beginning
        is not processed again. Default: a quarter of the free memory, at most 8 GiB; 0 = none.

    Raises
    ------
    ModelFileError, MemoryFullError
        A model cannot be found or loaded.
    PairError
        The draft shares too few tokens with the target, or the vocabularies of several drafts differ; or the
        target has no prediction heads.

    Examples
    --------
    >>> with open_pair(demo_target(), demo_draft()) as pair:  # doctest: +SKIP
    ...     for piece in pair.stream("import os", sampling=Sampling(temperature=0.7), seed=7):
    ...         print(piece.text, end="")
    """
    plan = make_plan(
        target,
        draft,
        copying=Copying.of(ngram),
        target_options=target_options,
        draft_options=draft_options,
    )
    return open_plan(plan, cache_ram=cache_ram, on_load=on_load)


def open_plan(plan: DraftPlan, *, cache_ram: int | None = None, on_load: LoadProgress | None = None) -> Pair:
    """Load the models of a plan; parameters and errors are those of `open_pair`."""
    start, heads = time.perf_counter(), None
    drafts: list[LlamaModel] = []
    with ExitStack() as opened:  # closes what is open if something goes wrong
        store = None if cache_ram is None else PrefixStore(cache_ram)
        target = LlamaModel(plan.target.path, plan.target.options, on_load, store=store)
        opened.callback(target.close)
        if plan.heads is not None:
            path = None if plan.has_own_heads else plan.heads.path
            heads = PredictionHeads(target, plan.heads.options, path, on_load)
            opened.callback(heads.close)
        for file in plan.drafts:
            drafts.append(LlamaModel(file.path, file.options, on_load, store=target.store))
            opened.callback(drafts[-1].close)
            if len(plan.drafts) > 1:
                check_pair(target.vocabulary, drafts[-1].vocabulary)
        draft, *stages = drafts or (None,)
        seconds = time.perf_counter() - start
        pair = Pair(
            target, draft, seconds, stages=stages, heads=heads, copying=plan.copying, owns_models=True
        )
        opened.pop_all()
    return pair
