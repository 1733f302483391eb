"""Options that several commands share, and how they become values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from llamaspec.app.names import AUTO, find_draft, find_model
from llamaspec.app.pair import DEFAULT_RULE, demo_draft, demo_target
from llamaspec.llama.files import check_gguf
from llamaspec.llama.options import CACHE_TYPES, FLASH_ATTENTION, MAX_GUESSES, ModelOptions
from llamaspec.rules.verify import RULES
from llamaspec.values import Sampling

Command = TypeVar("Command", bound=Callable[..., Any])

NGRAM = "ngram"  # in place of a draft's file
_CACHE = click.Choice(list(CACHE_TYPES))


class DraftLength(click.ParamType):  # type: ignore[type-arg]
    """A number of guesses, or "auto", which becomes None."""

    name = f"auto|0-{MAX_GUESSES}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """From the command line."""
        if value == "auto":
            return None
        try:
            length = int(value)
        except ValueError:
            length = -1
        if not 0 <= length <= MAX_GUESSES:
            self.fail(f"{value} is neither auto nor a number from 0 to {MAX_GUESSES}", param, ctx)
        return length


_MODEL_OPTIONS = (
    click.option("--target", metavar="MODEL", envvar="LLAMASPEC_TARGET",
                 help="The model that decides what is said: a file, a name, or hf:owner/repo:file."),
    click.option("--draft", metavar="MODEL|auto|ngram", envvar="LLAMASPEC_DRAFT",
                 help="The small model that guesses; auto = the one known for the target, ngram = copy from "
                      "earlier text instead."),
    click.option("--pair", metavar="NAME", help="A target and its draft by name: see llamaspec models list."),
    click.option("--ngram", is_flag=True,
                 help="Copy from earlier text where it goes on alike, before the draft is asked."),
    click.option("--n-ctx", type=int, help="Tokens of the target's context; default 4096, or the model's."),
    click.option("--draft-ctx", type=int, help="Tokens of the draft's context; default as the target's."),
    click.option("--gpu-layers", "-ngl", type=int, help="Target layers on the GPU; default: all it takes."),
    click.option("--draft-gpu-layers", type=int, help="Draft layers on the GPU; default: all it takes."),
    click.option("--threads", type=int, help="Threads for the target; default: physical cores."),
    click.option("--draft-threads", type=int, help="Threads for the draft; default as the target's."),
    click.option("--flash-attn", type=click.Choice(list(FLASH_ATTENTION)), default="auto", show_default=True,
                 help="Flash attention."),
    click.option("--cache-type-k", type=_CACHE, default="f16", show_default=True,
                 help="Target's keys in memory."),
    click.option("--cache-type-v", type=_CACHE, default="f16", show_default=True,
                 help="Target's values in memory."),
    click.option("--draft-cache-type-k", type=_CACHE, default="f16", show_default=True,
                 help="Draft's keys in memory; below q8_0 acceptance suffers."),
    click.option("--draft-cache-type-v", type=_CACHE, default="f16", show_default=True,
                 help="Draft's values in memory; below q8_0 acceptance suffers."),
    click.option("--verbose", is_flag=True, help="Show llama.cpp's own log on stderr."),
)  # fmt: skip

_SAMPLING_OPTIONS = (
    click.option("--max-tokens", "-n", type=click.IntRange(min=1), default=256, show_default=True,
                 help="Stop after this many tokens."),
    click.option("--temperature", "-t", type=float, default=0.8, show_default=True,
                 help="0 = always the best token."),
    click.option("--top-k", type=int, default=40, show_default=True, help="Keep the k best tokens; 0 = all."),
    click.option("--top-p", type=float, default=0.95, show_default=True,
                 help="Keep the best tokens with this much probability together; 1 = all."),
    click.option("--min-p", type=float, default=0.05, show_default=True,
                 help="Keep tokens at least this probable relative to the best; 0 = all."),
    click.option("--repeat-penalty", type=float, help="Divide the scores of tokens seen lately; 1 = off."),
    click.option("--presence-penalty", type=float, help="Lower the scores of tokens seen lately."),
    click.option("--frequency-penalty", type=float, help="The same, for each time they came."),
    click.option("--seed", type=int, help="For the same text again; default: drawn at random and reported."),
    click.option("--rule", type=click.Choice(list(RULES)), default=DEFAULT_RULE, show_default=True,
                 help="How guesses are judged; only coupled gives the same text for a seed without a draft."),
    click.option("--draft-length", "-k", type=DraftLength(), default="auto", show_default=True,
                 help="Guesses in each round; 0 = plain decoding, auto = as many as pay."),
    click.option("--exact", is_flag=True,
                 help="Evaluate only batch widths that are bit-identical with single tokens here."),
)  # fmt: skip


def model_options(command: Command) -> Command:
    """Options that say which models to load, and how."""
    return _with(_MODEL_OPTIONS, command)


def sampling_options(command: Command) -> Command:
    """Options that say how tokens are drawn and guessed."""
    return _with(_SAMPLING_OPTIONS, command)


def _with(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that is not loaded."""

    path: Path
    options: ModelOptions


@dataclass(frozen=True, slots=True)
class PairFiles:
    """A target and a draft that are not loaded."""

    target: ModelFile
    draft: ModelFile | None


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The models that a command was asked to load, as given on the command line."""

    target: str | None
    draft: str | None
    pair: str | None
    ngram: bool
    n_ctx: int | None
    draft_ctx: int | None
    gpu_layers: int | None
    draft_gpu_layers: int | None
    threads: int | None
    draft_threads: int | None
    flash_attn: str
    cache_type_k: str
    cache_type_v: str
    draft_cache_type_k: str
    draft_cache_type_v: str
    verbose: bool

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> ModelChoice:
        """Pick this value's fields out of a command's options.

        Raises
        ------
        click.UsageError
            A pair was named, and a target or a draft too.
        PairError
            A pair or the known draft was asked for, and none is known.
        """
        choice = cls(**{field.name: options[field.name] for field in fields(cls)})
        if choice.pair is not None:
            for name in ("target", "draft"):
                if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
                    raise click.UsageError(f"--pair names both models; drop --{name}")
            return replace(choice, target=choice.pair, draft=find_draft(choice.pair))
        if choice.draft == AUTO:
            return replace(choice, draft=find_draft(choice.target) if choice.target is not None else None)
        return choice

    @property
    def embedded(self) -> bool:
        """Whether no model was named, so that the embedded pair serves."""
        return self.target is None

    @property
    def target_path(self) -> Path:
        """The target's file."""
        return demo_target() if self.target is None else find_model(self.target)

    @property
    def draft_path(self) -> Path | None:
        """The draft's file; None where a target was named without one."""
        if self.draft == NGRAM:
            return None
        if self.draft is not None:
            return find_model(self.draft)
        return demo_draft() if self.embedded else None

    @property
    def copies(self) -> bool:
        """Whether guesses are copied from earlier text."""
        return self.ngram or self.draft == NGRAM

    @property
    def on_disk(self) -> PairFiles:
        """The files, and how to load them.

        Raises
        ------
        ModelFileError
            One of them is no model file.
        """
        paths = self.target_path, self.draft_path
        for path in paths:
            if path is not None:
                check_gguf(path)
        target_path, draft_path = paths
        draft = ModelFile(draft_path, self.draft_options) if draft_path is not None else None
        return PairFiles(ModelFile(target_path, self.target_options), draft)

    @property
    def target_options(self) -> ModelOptions:
        """How to load the target."""
        return ModelOptions(
            n_ctx=self.n_ctx,
            gpu_layers=self.gpu_layers,
            threads=self.threads,
            flash_attention=self.flash_attn,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
        )

    @property
    def draft_options(self) -> ModelOptions:
        """How to load the draft: one guess at a time is all that it is asked for."""
        return ModelOptions(
            n_ctx=self.n_ctx if self.draft_ctx is None else self.draft_ctx,
            gpu_layers=self.draft_gpu_layers,
            threads=self.threads if self.draft_threads is None else self.draft_threads,
            flash_attention=self.flash_attn,
            cache_type_k=self.draft_cache_type_k,
            cache_type_v=self.draft_cache_type_v,
            max_scored=1,
        )


def sampling_from(options: dict[str, Any]) -> Sampling:
    """The sampling chain that a command was asked for, with "off" values as None."""
    return Sampling(
        temperature=options["temperature"],
        top_k=options["top_k"] or None,
        top_p=None if options["top_p"] == 1 else options["top_p"],
        min_p=options["min_p"] or None,
        repeat_penalty=None if options["repeat_penalty"] == 1 else options["repeat_penalty"],
        presence_penalty=options["presence_penalty"] or None,
        frequency_penalty=options["frequency_penalty"] or None,
    )
