"""Opens the models that a command line names, and tells the person what there is to know about them."""

from __future__ import annotations

import click

from llamaspec.app.catalog import read_catalog
from llamaspec.app.options import ModelChoice
from llamaspec.app.pair import Pair, open_pair
from llamaspec.app.terminal import SlowProgress
from llamaspec.llama import runtime

_LOSSY_CACHES = ("q4_0", "q4_1", "q5_0", "q5_1")


def open_choice(choice: ModelChoice, *, with_draft: bool = True) -> Pair:
    """Load the models with a progress bar, and warn on stderr of what will surprise."""
    runtime.set_verbose(choice.verbose)
    draft = choice.draft_path if with_draft else None
    if choice.embedded:
        click.echo("llamaspec: no --target given, using the small embedded pair", err=True)
    elif with_draft and draft is None and not choice.copies:
        remedy = "auto" if read_catalog().draft_of(str(choice.target)) else "ngram"
        click.echo(f"llamaspec: no --draft given, decoding plainly; try --draft {remedy}", err=True)
    with SlowProgress("loading") as progress:
        pair = open_pair(
            choice.target_path,
            draft,
            ngram=with_draft and choice.copies,
            target_options=choice.target_options,
            draft_options=choice.draft_options,
            on_load=progress,
        )
    _warn(pair, choice)
    return pair


def _warn(pair: Pair, choice: ModelChoice) -> None:
    if not runtime.repacking_is_safe():
        click.echo(
            "llamaspec: warning: this build of llama.cpp uses AMX, which crashes; its fast kernels stay off; "
            "build it with CMAKE_ARGS=-DCMAKE_CXX_FLAGS=-mno-amx-tile, or by `make run`",
            err=True,
        )
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        if model is not None and model.options.n_ctx and model.options.n_ctx > model.trained_context_size:
            click.echo(
                f"llamaspec: warning: the {name} was trained on {model.trained_context_size} tokens, "
                f"a context of {model.options.n_ctx} was asked for; its text may break down beyond that",
                err=True,
            )
    if pair.draft is not None and {choice.draft_cache_type_k, choice.draft_cache_type_v} & set(_LOSSY_CACHES):
        click.echo("llamaspec: warning: a draft memory below q8_0 makes its guesses worse", err=True)
