"""Opens the models that a command line names, and tells the person what there is to know about them."""

from __future__ import annotations

from contextlib import suppress

from llamaspec.cli.model_options import ModelChoice
from llamaspec.cli.terminal import SlowProgress, say
from llamaspec.drafters.ngram import PastTexts
from llamaspec.hub import has_draft
from llamaspec.llama import runtime
from llamaspec.measure.store import PairFiles
from llamaspec.opening import drafts_itself, open_pair
from llamaspec.pair import Pair
from llamaspec.suffix_store import SuffixStore
from llamaspec.values import MTP

_LOSSY_CACHES = ("q4_0", "q4_1", "q5_0", "q5_1")


def open_files(files: PairFiles, choice: ModelChoice) -> Pair:
    """Load the models with a progress bar, and warn on stderr of what will surprise."""
    runtime.set_verbose(choice.verbose)
    if choice.is_embedded:
        say("no --target given, using the small embedded pair")
    elif not files.drafts and not choice.no_draft:
        target = str(choice.target)
        remedy = "auto" if has_draft(target) or drafts_itself(target) else "ngram"
        say(f"no --draft given, decoding plainly; try --draft {remedy}")
    named = [model.path for model in files.draft_models]
    with SlowProgress("loading") as progress:
        pair = open_pair(
            files.target.path,
            MTP if files.heads else named,
            ngram=files.ngram,
            past=_past(files) if files.ngram and choice.past_texts else None,
            target_options=files.target.options,
            draft_options=files.draft.options if files.draft is not None else None,
            on_load=progress,
        )
    _warn(pair)
    return pair


def keep_texts(pair: Pair) -> None:
    """Keep the texts of a run, if earlier ones are looked up."""
    if pair.past is not None:
        with suppress(OSError):  # the text is what people came for
            SuffixStore.of(pair.target.path).add(pair.past.added)


def _past(files: PairFiles) -> PastTexts:
    past, fault = SuffixStore.of(files.target.path).read()
    if fault is not None:
        say(fault)
    return past


def _warn(pair: Pair) -> None:
    if not runtime.repacking_is_safe():
        say(
            "warning: this build of llama.cpp uses AMX, which crashes; its fast kernels stay off; "
            "build it with CMAKE_ARGS=-DCMAKE_CXX_FLAGS=-mno-amx-tile, or by `make run`"
        )
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        if model is not None and model.options.n_ctx and model.options.n_ctx > model.trained_context_size:
            say(
                f"warning: the {name} was trained on {model.trained_context_size} tokens, "
                f"a context of {model.options.n_ctx} was asked for; its text may break down beyond that"
            )
    if pair.common is not None:
        share = f"{pair.common.of_text:.0%} of an ordinary text's tokens"
        say(f"the draft has another vocabulary, with {share}; it drafts with these")
    if pair.draft is not None:
        types = {pair.draft.options.cache_type_k, pair.draft.options.cache_type_v}
        if types & set(_LOSSY_CACHES):
            say("warning: a KV cache of the draft below q8_0 makes its draft tokens worse")
