"""Options that say which models to load and how, and the files that they name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from llamaspec.cli.fetching import fetched_model, known_draft
from llamaspec.cli.option_groups import Command, Decorator, option_group
from llamaspec.cli.parameters import DEVICE_NAMES, SHARES, DraftName
from llamaspec.errors import PairError
from llamaspec.hub import AUTO, locate_model, may_have_heads
from llamaspec.llama.gguf_header import check_gguf
from llamaspec.llama.nextn import check_heads
from llamaspec.llama.options import CACHE_TYPES, DRAFT_SCORED, FLASH_ATTENTION, ModelOptions
from llamaspec.measure.store import ModelFile, PairFiles
from llamaspec.opening import NGRAM, demo_draft, demo_target, drafts_itself
from llamaspec.values import MTP

_CACHE = click.Choice(list(CACHE_TYPES))

_NAMES: tuple[Decorator, ...] = (
    click.option("--target", "--model", "-m", metavar="MODEL", envvar="LLAMASPEC_TARGET",
                 help="The model that decides what is said: a file, a name, hf:owner/repo with :file or "
                      ":QUANTIZATION, or the address of a page of the hub."),
    click.option("--draft", "--model-draft", "-md", metavar="MODEL|auto|mtp|ngram", multiple=True,
                 type=DraftName(), envvar="LLAMASPEC_DRAFT",
                 help="The small model that proposes tokens; auto = the one known for the target, or its "
                      "heads; mtp = the target's own prediction heads; ngram = look up draft tokens in "
                      "earlier text instead. Of several, each drafts for the one before it."),
    click.option("--pair", metavar="NAME", help="A target and its draft by name: see llamaspec models list."),
    click.option("--ngram", is_flag=True,
                 help="Look up draft tokens in earlier text that repeats itself, before the draft is asked."),
    click.option("--past-texts/--no-past-texts", envvar="LLAMASPEC_PAST_TEXTS",
                 help="With ngram: look up draft tokens in texts of earlier runs, too, and keep this one, in "
                      "the cache folder, readable by you alone. Default: nothing is kept."),
)  # fmt: skip
_SIZE: dict[str, Any] = {
    "type": int,
    "help": "Tokens of the target's context; default as trained, as far as memory allows.",
}
_CONTEXT = click.option("--n-ctx", "--ctx-size", "-c", **_SIZE)
_CONTEXT_OF_CHAT = click.option("--n-ctx", "--ctx-size", **_SIZE)  # whose -c may also stand alone
_COMPUTING: tuple[Decorator, ...] = (
    click.option("--draft-ctx", "--ctx-size-draft", "-cd", type=int,
                 help="Tokens of the draft's context; default as --n-ctx."),
    click.option("--gpu-layers", "-ngl", type=int, help="Target layers on the GPU; default: all it takes."),
    click.option("--draft-gpu-layers", type=int, help="Draft layers on the GPU; default: all it takes."),
    click.option("--device", "-dev", type=DEVICE_NAMES, metavar="NAME,...",
                 help="What computes the target's layers: names that llamaspec doctor shows, RPC0, RPC1, ... "
                      "on workers, or none. Default: the workers, and all GPUs."),
    click.option("--draft-device", "-devd", type=DEVICE_NAMES, metavar="NAME,...",
                 help="The same for the draft, on this machine."),
    click.option("--tensor-split", "-ts", type=SHARES, default=(), metavar="N,N,...",
                 help="Shares of the target's layers on these devices; default: by their free memory."),
    click.option("--rpc", multiple=True, metavar="HOST:PORT",
                 help="A machine that runs llamaspec worker, or llama.cpp's rpc-server of the same version, "
                      "and computes the target's layers, alone or with others. Private networks only."),
    click.option("--threads", type=int, help="Threads for the target; default: the free physical cores."),
    click.option("--draft-threads", type=int, help="Threads for the draft; default as the target's."),
    click.option("--flash-attn", type=click.Choice(list(FLASH_ATTENTION)), envvar="LLAMASPEC_FLASH_ATTN",
                 help="Flash attention; auto = as llama.cpp chooses. Default: auto; on CPUs off for K-"
                      "quants, if the context has more than 256 tokens."),
    click.option("--cache-type-k", type=_CACHE, default="f16", show_default=True,
                 help="Keys in the target's KV cache."),
    click.option("--cache-type-v", type=_CACHE, default="f16", show_default=True,
                 help="Values in the target's KV cache."),
    click.option("--draft-cache-type-k", type=_CACHE, default="f16", show_default=True,
                 help="Keys in the draft's KV cache; below q8_0 acceptance suffers."),
    click.option("--draft-cache-type-v", type=_CACHE, default="f16", show_default=True,
                 help="Values in the draft's KV cache; below q8_0 acceptance suffers."),
    click.option("--verbose", is_flag=True, help="Show llama.cpp's own log on stderr."),
)  # fmt: skip
_NO_DRAFT = click.option("--no-draft", is_flag=True, help="Plain decoding, to compare with.")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The models that a command was asked for, as named on the command line.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    target: str | None
    draft: str | None
    pair: str | None
    ngram: bool
    past_texts: bool
    n_ctx: int | None
    draft_ctx: int | None
    gpu_layers: int | None
    draft_gpu_layers: int | None
    threads: int | None
    draft_threads: int | None
    flash_attn: str | None
    cache_type_k: str
    cache_type_v: str
    draft_cache_type_k: str
    draft_cache_type_v: str
    verbose: bool
    device: tuple[str, ...] | None
    draft_device: tuple[str, ...] | None
    tensor_split: tuple[float, ...]
    rpc: tuple[str, ...]
    no_draft: bool = False
    stages: tuple[str, ...] = ()  # the draft's draft, and so on

    def __post_init__(self) -> None:
        _ = self.target_options, self.draft_options  # what is out of range is refused here

    @property
    def is_embedded(self) -> bool:
        """Whether no model was named, so that the embedded pair serves."""
        return self.target is None

    @property
    def looks_up(self) -> bool:
        """Whether draft tokens are looked up in earlier text."""
        return not self.no_draft and (self.ngram or self.draft == NGRAM)

    @property
    def target_options(self) -> ModelOptions:
        """How to load the target."""
        return ModelOptions(
            n_ctx=self.n_ctx,
            gpu_layers=self.gpu_layers,
            devices=self.device,
            tensor_split=self.tensor_split,
            workers=self.rpc,
            threads=self.threads,
            flash_attention=self.flash_attn,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
        )

    @property
    def draft_options(self) -> ModelOptions:
        """How to load the draft: one draft token at a time is all that it is asked for."""
        return ModelOptions(
            n_ctx=self.n_ctx if self.draft_ctx is None else self.draft_ctx,
            gpu_layers=self.draft_gpu_layers,
            devices=self.draft_device,
            threads=self.threads if self.draft_threads is None else self.draft_threads,
            flash_attention=self.flash_attn,
            cache_type_k=self.draft_cache_type_k,
            cache_type_v=self.draft_cache_type_v,
            max_scored=DRAFT_SCORED,
        )


def _choice(**given: Any) -> ModelChoice:
    """From the command line, where a pair in the environment gives way to names that are nearer."""
    draft, *stages = given.pop("draft") or (None,)
    addresses = tuple(address for named in given.pop("rpc") for address in named.split(","))
    choice = ModelChoice(draft=draft, stages=tuple(stages), rpc=addresses, **given)
    if choice.pair is None:
        return choice
    for name in ("target", "draft"):
        if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--pair names both models; drop --{name}", click.get_current_context())
    return replace(choice, target=choice.pair, draft=AUTO)


def model_options(command: Command) -> Command:
    """Options for the models; the command gets a ModelChoice as `models`."""
    return option_group("models", _choice, (*_NAMES, _CONTEXT, *_COMPUTING))(command)


def model_or_plain_options(command: Command) -> Command:
    """The same with --no-draft."""
    return option_group("models", _choice, (*_NAMES, _CONTEXT, *_COMPUTING, _NO_DRAFT))(command)


def chat_model_options(command: Command) -> Command:
    """The same without -c, which `file_options` reads."""
    return option_group("models", _choice, (*_NAMES, _CONTEXT_OF_CHAT, *_COMPUTING, _NO_DRAFT))(command)


def find_files(
    choice: ModelChoice,
    *,
    shaped: Callable[[PairFiles], PairFiles] = lambda files: files,
) -> PairFiles:
    """The files of the models; fetched first if they lie on the hub and not here.

    Parameters
    ----------
    choice : ModelChoice
    shaped : callable
        What else is to be known of them first, such as the size of their contexts.

    Raises
    ------
    PairError
        The known draft was asked for, and none is known.
    ModelFileError
        There is no such model, or it cannot be fetched.
    """
    return shaped(_find(choice, fetched_model))


def find_files_here(choice: ModelChoice) -> PairFiles:
    """The files of the models, which must all be on this machine; nothing is fetched.

    Raises
    ------
    PairError
        The known draft was asked for, and none is known.
    ModelFileError
        There is no such model, it is not here, or a file is no model.
    """
    found = _find(choice, locate_model)
    for model in (found.target, *found.draft_models):
        check_gguf(model.path)
    return found


def _find(choice: ModelChoice, find: Callable[[str], Path]) -> PairFiles:
    named, target = choice.draft, demo_target()
    if choice.target is not None:
        if named == AUTO and not may_have_heads(choice.target):
            known_draft(choice.target)  # said before anything is fetched
        target = find(choice.target)
    if named == AUTO:  # what was just fetched may have heads
        named = None
        if choice.target is not None:
            named = MTP if drafts_itself(choice.target) else known_draft(choice.target)
    heads = named == MTP and not choice.no_draft
    if heads:
        check_heads(target)
    if choice.stages and {named, *choice.stages} & {MTP, NGRAM, AUTO}:
        raise PairError(
            "a draft has drafts of its own only where all are models; give --draft once, or name files"
        )
    stages = () if choice.no_draft else choice.stages
    draft = None
    if named not in (None, MTP, NGRAM) and not choice.no_draft:
        draft = find(str(named))
    elif named is None and choice.is_embedded and not choice.no_draft:
        draft = demo_draft()
    return PairFiles(
        ModelFile(target, choice.target_options),
        ModelFile(draft, choice.draft_options) if draft is not None else None,
        tuple(ModelFile(find(name), choice.draft_options) for name in stages),
        ngram=choice.looks_up,
        heads=heads,
    )
