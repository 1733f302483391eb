"""Models of a command: the options for them, the plan with their files, and opening them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from llamaspec.catalog import defaults_of, locate_model, read_catalog, resolve_model
from llamaspec.cli.option_groups import Decorator, option_group
from llamaspec.cli.output import SlowProgress, say
from llamaspec.hub import is_path
from llamaspec.kernels import AUTO as AUTO_KERNELS
from llamaspec.kernels import OFF, VARIABLE, parse_choice
from llamaspec.length.automatic import AutoLength
from llamaspec.length.prior import LearnedPrior
from llamaspec.llama import runtime
from llamaspec.llama.gguf_file import check_gguf
from llamaspec.llama.options import CACHE_TYPES, DRAFT_SCORED, FLASH_ATTENTION, ModelOptions
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.measure.findings import OK, llama_cpp_misfit, option_findings
from llamaspec.measure.store import stored
from llamaspec.measure.verdict import pair_verdict
from llamaspec.opening import Drafting, open_plan
from llamaspec.pair import Pair, demo_draft, demo_target
from llamaspec.plan import AUTO, NGRAM, NONE, DraftPlan, Find, known_draft, make_plan
from llamaspec.values import MTP, Copying, Source

ALMOST = 0.99  # most progress shown while loading: after the weights, contexts are created


class _ModelName(click.types.StringParamType):
    """The name of a model. The environment variable holds one name, which may contain spaces."""

    envvar_list_splitter = "\0"


class _KernelsChoice(click.Choice[str]):
    """auto or off. The environment variable may have other words for off, which llamaspec.kernels knows."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        with suppress(ValueError):  # then the message is click's
            value = parse_choice(value)
        return super().convert(value, param, ctx)


def _only_one(ctx: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> str | None:
    if len(names) > 1:
        raise click.UsageError(f"a target has one draft; drop all but one --{parameter.name}", ctx)
    return names[0] if names else None


_CACHE = click.Choice(list(CACHE_TYPES))

KERNELS_OPTION = click.option(
    "--kernels", type=_KernelsChoice([AUTO_KERNELS, OFF]), default=AUTO_KERNELS, show_default=True,
    envvar=VARIABLE,
    help="llamaspec's own CPU kernels for a few tokens at once; auto = if they are built and suit the "
         "processor and the weights; off = only llama.cpp's.",
)  # fmt: skip


def complete_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of models that the shell may offer; of pairs, for --pair; otherwise files, too."""
    is_pair = parameter.name == "pair"
    entries = [] if is_path(incomplete) else read_catalog().entries.values()
    names = [entry.name for entry in entries if not is_pair or entry.draft is not None or entry.heads]
    found = [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
    return found if is_pair else [*found, CompletionItem(incomplete, type="file")]


def _use_defaults(ctx: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """Let the options that the lists give for a model hold where the command line gives none."""
    if name is not None and ctx.params.get("pair") is None and not ctx.resilient_parsing:
        ctx.default_map = dict(defaults_of(name).given)
    return name


_A_MODEL = (
    "a file, a name from llamaspec models list, hf:owner/repo:FILE, hf:owner/repo:QUANTIZATION, or the "
    "address of its page on the hub."
)
_TARGET = click.option("--target", "--model", "-m", metavar="MODEL", envvar="LLAMASPEC_TARGET",
                       is_eager=True, callback=_use_defaults, shell_complete=complete_names,
                       help=f"The large model: {_A_MODEL} -hf owner/repo:TYPE works, too.")  # fmt: skip
_TARGETS = click.option("--target", "--model", "-m", metavar="[NAME=]MODEL", envvar="LLAMASPEC_TARGET",
                        multiple=True, type=_ModelName(), shell_complete=complete_names,
                        help=f"A model to serve, under a NAME of your choice: {_A_MODEL} May be repeated. "
                             "Default: all models at hand.")  # fmt: skip
_DRAFT = click.option("--draft", "--model-draft", "-md", metavar="MODEL|auto|mtp|ngram|none", multiple=True,
                      type=_ModelName(), callback=_only_one, envvar="LLAMASPEC_DRAFT",
                      shell_complete=complete_names,
                      help="The small model that proposes tokens. auto = the draft known for the target, or "
                           "else its prediction heads; mtp = the target's own prediction heads; ngram = no "
                           "model, only copies of earlier text; none = no model. Default: auto if nothing "
                           "must be fetched and memory suffices.")  # fmt: skip
_PAIR = partial(click.option, "--pair", metavar="NAME", shell_complete=complete_names,
                help="A target and its draft, by a name from llamaspec models list.")  # fmt: skip
_NGRAM = click.option("--ngram/--no-ngram", default=None,
                      help="Copy draft tokens from earlier text if the text repeats itself. Default: on, but "
                           "off beside a draft model with a fixed draft length.")  # fmt: skip
_COMPUTING: tuple[Decorator, ...] = (
    click.option("--n-ctx", "--ctx-size", "-c", type=int, help="Context size in tokens; default: the model's "
                 "training context, limited by memory; for generate no more than the text can need."),
    click.option("--mmproj", type=click.Path(path_type=Path), help="Projector for pictures; used by serve."),
    click.option("--draft-ctx", "--ctx-size-draft", "-cd", type=int,
                 help="Context size of the draft; default: the same as --n-ctx."),
    click.option("--gpu-layers", "-ngl", type=int, help="Target layers on the GPU; default: all that fit."),
    click.option("--draft-gpu-layers", type=int, help="Draft layers on the GPU; default: all that fit."),
    click.option("--device", "-dev", metavar="NAME,...",
                 help="Devices for the target's layers: names from llamaspec doctor; RPC0, RPC1, ... for "
                      "workers; none for no device. Default: the workers and all GPUs."),
    click.option("--draft-device", "-devd", metavar="NAME,...", help="Local devices for the draft."),
    click.option("--tensor-split", "-ts", metavar="N,N,...",
                 help="Each device's share of the target's layers; default: by free memory."),
    click.option("--rpc", multiple=True, metavar="HOST:PORT",
                 help="A machine that computes target layers with llamaspec worker, or with llama.cpp's "
                      "rpc-server of the same version; may be repeated. Use private networks only."),
    click.option("--threads", type=int, help="Threads for the target; default: the free full-speed cores."),
    click.option("--draft-threads", type=int, help="Threads for the draft; default: those of the target."),
    click.option("--flash-attn", type=click.Choice(list(FLASH_ATTENTION)), default="auto",
                 envvar="LLAMASPEC_FLASH_ATTN", show_default=True,
                 help="Flash attention; auto = llama.cpp decides. Probe with each to see the difference."),
    KERNELS_OPTION,
    click.option("--cache-type-k", type=_CACHE, default="f16", show_default=True,
                 help="Type of keys in the target's KV cache."),
    click.option("--cache-type-v", type=_CACHE, default="f16", show_default=True,
                 help="Type of values in the target's KV cache."),
    click.option("--draft-cache-type-k", type=_CACHE, default="f16", show_default=True,
                 help="Type of keys in the draft's KV cache; below q8_0, acceptance drops."),
    click.option("--draft-cache-type-v", type=_CACHE, default="f16", show_default=True,
                 help="Type of values in the draft's KV cache; below q8_0, acceptance drops."),
    click.option("--verbose", is_flag=True, help="Show llama.cpp's log on stderr."),
)  # fmt: skip
_NO_DRAFT = click.option("--no-draft", is_flag=True, help="Draft nothing, for comparison.")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The models as given on the command line."""

    target: str
    draft: str | None
    is_embedded: bool  # no target was given, so the embedded pair is used
    copying: Copying
    no_draft: bool
    target_options: ModelOptions
    draft_options: ModelOptions  # without n_ctx, the draft's context is as large as the target's


def _choice(
    *, target: str | None, draft: str | None, pair: str | None, ngram: bool | None,
    verbose: bool, no_draft: bool = False, **given: Any,
) -> ModelChoice:  # fmt: skip
    """Make a ModelChoice; --pair overrides the environment variables."""
    if pair is not None:
        context = click.get_current_context()
        for name in ("target", "draft"):
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise ValueError(f"--pair names both models; drop --{name}")
        target, draft = pair, AUTO
    if draft == NGRAM and ngram is False and not no_draft:
        raise ValueError("--draft ngram and --no-ngram contradict each other; drop one")
    runtime.log.verbose = verbose
    is_embedded, copying = target is None, Copying.of(ngram)
    if no_draft:
        draft, copying = None, Copying.OFF
    elif is_embedded and draft in (None, AUTO):
        draft = str(demo_draft())
    target_options = ModelOptions(
        n_ctx=given["n_ctx"],
        gpu_layers=given["gpu_layers"],
        devices=device_names(given["device"]),
        tensor_split=_shares(given["tensor_split"]),
        workers=tuple(address for named in given["rpc"] for address in named.split(",")),
        threads=given["threads"],
        flash_attention=given["flash_attn"],
        kernels=given["kernels"],
        projector=given["mmproj"],
        cache_type_k=given["cache_type_k"],
        cache_type_v=given["cache_type_v"],
    )
    draft_options = ModelOptions(
        n_ctx=given["draft_ctx"],
        gpu_layers=given["draft_gpu_layers"],
        devices=device_names(given["draft_device"]),
        threads=given["threads"] if given["draft_threads"] is None else given["draft_threads"],
        flash_attention=given["flash_attn"],
        kernels=given["kernels"],
        cache_type_k=given["draft_cache_type_k"],
        cache_type_v=given["draft_cache_type_v"],
        max_scored=DRAFT_SCORED,
    )
    return ModelChoice(
        target or str(demo_target()), draft, is_embedded, copying, no_draft, target_options, draft_options
    )


def device_names(text: str | None) -> tuple[str, ...] | None:
    """Parse the value of --device; None = llama.cpp's choice."""
    if text is None:
        return None
    return () if text == "none" else tuple(name.strip() for name in text.split(","))


def _shares(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        return tuple(float(share) for share in text.replace("/", ",").split(","))  # llama.cpp allows slashes
    except ValueError:
        raise ValueError(f"--tensor-split needs numbers such as 3,1, not {text}") from None


# The command receives a ModelChoice as `models`.
_ONE_MODEL = (_TARGET, _DRAFT, _PAIR(is_eager=True, callback=_use_defaults), _NGRAM, *_COMPUTING)
model_options = option_group("models", _choice, _ONE_MODEL)
model_or_plain_options = option_group("models", _choice, (*_ONE_MODEL, _NO_DRAFT))


_ANY_TARGETS = (None, AUTO, MTP, NGRAM, NONE)  # values of --draft that suit every target


@dataclass(frozen=True, slots=True)
class ModelChoices:
    """The models of a server as given on the command line."""

    first: ModelChoice  # the first target, or the embedded pair if there is none
    draft: str | None  # as given
    targets: tuple[tuple[str | None, str], ...]  # the name of each, if it has one of its own, and the model

    @property
    def draft_file(self) -> str | None:
        """The draft, if it is that of one target."""
        return None if self.draft in _ANY_TARGETS else self.draft

    def of(self, target: str) -> ModelChoice:
        """Return the choice of one of several targets; a draft's file belongs to the one that is named."""
        is_named = target in {model for _, model in self.targets}
        draft = self.draft if is_named or self.draft_file is None else None
        return replace(self.first, target=target, draft=draft, is_embedded=False)


def _choices(*, target: tuple[str, ...], **given: Any) -> ModelChoices:
    """Make ModelChoices; ValueError if the draft is a file and there are several targets."""
    targets = [_named(each) for each in target]
    first = _choice(target=targets[0][1] if targets else None, **given)
    draft = None if first.no_draft else given["draft"]
    if len(targets) > 1 and draft not in _ANY_TARGETS:
        raise ValueError(
            "--draft can name the draft of one target; with several, use --draft auto, and give each its "
            "draft with: llamaspec models add NAME FILE --draft DRAFT"
        )
    if given["pair"] is not None:
        targets = [(None, first.target)]
    return ModelChoices(first, draft, tuple(targets))


def _named(given: str) -> tuple[str | None, str]:
    """Split NAME=MODEL. The path of a file may contain "=", too."""
    name, _, model = given.partition("=")
    is_split = name and model and not set(name) & {"/", "\\"} and not os.path.exists(given)  # noqa: PTH110
    return (name, model) if is_split else (None, given)


# The command receives ModelChoices as `models`.
served_model_options = option_group(
    "models", _choices, (_TARGETS, _DRAFT, _PAIR(), _NGRAM, *_COMPUTING, _NO_DRAFT)
)


def fetched_model(name: str | Path) -> Path:
    """Return the file of a model, fetching it if necessary; ModelFileError if that fails."""
    # huggingface-hub has a bar, but only on a terminal.
    return resolve_model(name, lambda file, n_missing: say(f"fetching {file}, {n_missing / 1e9:.1f} GB"))


def find_plan(choice: ModelChoice, find: Find = fetched_model, **how: Any) -> DraftPlan:
    """Return the plan with its files; by default, models on the hub are fetched first.

    `how` to choose a draft that nobody asked for: see `make_plan`, which also names the errors.
    """
    n_ctx = choice.draft_options.n_ctx or choice.target_options.n_ctx
    return make_plan(
        choice.target,
        choice.draft,
        by_default=not choice.no_draft,
        copying=choice.copying,
        target_options=choice.target_options,
        draft_options=replace(choice.draft_options, n_ctx=n_ctx),
        find=find,
        **how,
    )


def find_plan_here(choice: ModelChoice) -> DraftPlan:
    """Return the plan without fetching; ModelFileError if a model is not on this machine."""
    plan = find_plan(choice, locate_model)
    check_files(plan)
    return plan


def check_files(plan: DraftPlan) -> None:
    """Raise a ModelFileError if a file is not a model, before another one is loaded."""
    for model in plan.models:
        check_gguf(model.path)


def open_models(
    plan: DraftPlan,
    choice: ModelChoice,
    drafting: Drafting = Drafting(),  # noqa: B008  # immutable
    store: PrefixStore | None = None,
) -> Pair:
    """Open a pair with a progress bar, and warn on stderr about surprising settings."""
    if choice.is_embedded:
        say("no --target given, using the small embedded pair")
    elif choice.no_draft:
        pass
    elif choice.draft is None:
        _say_default(plan, choice)
    check_files(plan)
    with SlowProgress("loading") as progress:
        pair = open_plan(
            plan,
            drafting,
            store=store,
            on_load=lambda done: progress(min(done, ALMOST)),
            notify=say,
        )
    _warn(pair)
    return pair


def _say_default(plan: DraftPlan, choice: ModelChoice) -> None:
    """Say what drafts if no draft was given, if that is surprising."""
    used = plan.heads if plan.draft is None else plan.draft
    if plan.has_own_heads:
        say("no --draft given, using the target's own prediction heads (--draft none: no heads)")
    elif used is not None:
        known = f"{used.path.name}, which is known for this target"
        say(f"no --draft given, using {known} (--draft none: no draft)")
    elif plan.is_plain:
        say("no --draft given, decoding plainly")
    elif (name := known_draft(choice.target, lambda _: plan.target.path)) is not None:
        copies = "so draft tokens are only copied from earlier text"
        say(f"no --draft given, {copies}; --draft auto would use {'its heads' if name == MTP else name}")


@contextmanager
def reporting(
    plan: DraftPlan,
    choice: ModelChoice,
    drafting: Drafting,
    store: PrefixStore | None = None,
    *,
    quiet: bool = False,
) -> Iterator[Pair]:
    """Open a pair, and close it at the end.

    Unless `quiet`, say after the first run that the pair was measured, and as soon as it is known, how much
    faster drafting is.
    """
    with open_models(plan, choice, drafting, store) as pair:
        drafts = isinstance(pair.length, AutoLength) and Source.MODEL in pair.sources
        reports = drafts and not quiet and not choice.is_embedded and pair_verdict(pair) is None
        is_first = stored(pair, LearnedPrior) is None
        yield pair
    if reports and is_first and stored(pair, LearnedPrior) is not None:
        say("first run with this pair: its speed was measured, and the next runs start from that")
    if reports and (found := pair_verdict(pair)) is not None:
        say(found)


def _warn(pair: Pair) -> None:
    if (misfit := llama_cpp_misfit(pair.target.options)) is not None:
        say(f"warning: {misfit}")
    if not (runtime.repacking_is_safe() or all(model.weights.suits_kernels for model in pair.models)):
        say(
            "warning: this build of llama.cpp uses AMX, which crashes; its fast kernels stay off; "
            "build it with CMAKE_ARGS=-DCMAKE_CXX_FLAGS=-mno-amx-tile, or by `make run`"
        )
    for role, model in zip(("target", "draft"), pair.models, strict=False):
        for finding in option_findings(role, model):
            if finding.level != OK:
                say(f"warning: {finding.topic}: {finding.text}; {finding.remedy}")
    sizes = [model.weights.facts.n_computing for model in pair.models]
    if sizes[0] < max(sizes):
        say("warning: the draft has more parameters than the target; swap --target and --draft")
    if pair.common is not None:
        share = f"{pair.common.of_text:.0%} of typical text"
        say(f"the draft has a different vocabulary, covering about {share}; it drafts from the shared tokens")
