"""Where the draft tokens for a target come from: decided once, by `make_plan`, before a model is loaded.

`make_plan` turns names and options into a `DraftPlan`. The commands, `open_pair` and the server all start
from one; nothing after that resolves a name or decides again. Once the models are loaded, `SequenceDrafters`
makes the drafters of each completion from them. tests/test_plan.py, tests/test_cascades.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

from llamaspec.catalog import is_path, locate_model, read_catalog, resolve_model
from llamaspec.drafters.cascade import CascadeDrafter
from llamaspec.drafters.common_vocabulary import CommonTokens
from llamaspec.drafters.fallback import FallbackDrafter, ForcedDrafter
from llamaspec.drafters.model import ModelDrafter, TreeDrafter
from llamaspec.drafters.ngram import MIN_MATCH, MIN_MATCH_BESIDE_MODEL, NgramDrafter
from llamaspec.engine.speculate import Speculation
from llamaspec.errors import ModelFileError, PairError, quoted
from llamaspec.files import cache_folder, file_identity, model_stem
from llamaspec.length.fixed import prompt_reading
from llamaspec.length.policy import AutoLength
from llamaspec.length.tree import TreeLength
from llamaspec.llama.gguf_file import read_gguf
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.nextn import check_heads, heads_in_file, is_shared_head
from llamaspec.llama.options import DRAFT_SCORED, MAX_DRAFT, ModelOptions
from llamaspec.protocols import Drafter, LengthPolicy
from llamaspec.sampling.acceptance_rules import Coupled
from llamaspec.sampling.random_streams import CascadeStreams
from llamaspec.values import DRAFT, MTP, NO_TOKENS, Copying, Source, TokenArray

AUTO = "auto"  # in place of a draft: the one that is known for the target
DRAFT_FOR = "llamaspec.draft_for"  # metadata of a draft made here: the identity of its target
NGRAM = "ngram"  # in place of a draft: only copies of earlier text
Find = Callable[[str | Path], Path]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that is not loaded."""

    path: Path
    options: ModelOptions


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A target and where its draft tokens come from: draft models or prediction heads, not both."""

    target: ModelFile
    drafts: tuple[ModelFile, ...] = ()  # the first drafts for the target, each other for the previous one
    heads: ModelFile | None = None  # prediction heads: in the target's file, or in a file of their own
    copying: Copying = Copying.WEIGHED

    def __post_init__(self) -> None:
        if self.drafts and self.heads is not None:
            raise ValueError("a target has a draft model or prediction heads, not both")

    @property
    def draft(self) -> ModelFile | None:
        """The draft model of the target."""
        return self.drafts[0] if self.drafts else None

    @property
    def has_own_heads(self) -> bool:
        """Whether the heads are in the target's file."""
        return self.heads is not None and self.heads.path == self.target.path

    @property
    def models(self) -> tuple[ModelFile, ...]:
        """The target and the draft models."""
        return (self.target, *self.drafts)

    @property
    def is_plain(self) -> bool:
        """Whether there are no draft tokens: plain decoding."""
        return not self.drafts and self.heads is None and self.copying is Copying.OFF


def make_plan(
    target: str | Path,
    draft: str | Path | Sequence[str | Path] | None = None,
    *,
    copying: Copying = Copying.WEIGHED,
    target_options: ModelOptions | None = None,
    draft_options: ModelOptions | None = None,
    find: Find = resolve_model,
) -> DraftPlan:
    """Resolve names and options into a plan; this reads only the metadata of the files.

    Parameters
    ----------
    target, draft
        As for `open_pair`.
    find : callable
        Returns the file of a name. `locate_model` fetches nothing.

    Raises
    ------
    PairError
        No draft is known for the target, it has no prediction heads, or the drafts cannot be combined.
    ModelFileError
        There is no such model.
    """
    names = [draft] if isinstance(draft, str | Path) else [*(draft or ())]
    if len(names) > 1 and {*names} & {MTP, NGRAM, AUTO}:
        raise PairError("only model files can draft for each other; give one draft, or name files")
    if names == [AUTO]:
        known = known_draft(target, find)
        if known is None:
            raise PairError(f"no draft is known for {quoted(str(target))}; name one, or leave the draft out")
        names = [known]
    path, options = find(target), target_options or ModelOptions()
    heads: Path | None = None
    if names == [MTP]:
        check_heads(path)
        heads, names = path, []
    elif names == [NGRAM]:
        copying, names = Copying.ON, []
    files = [find(name) for name in names]
    if len(files) == 1 and is_shared_head(files[0]):
        heads, files = files[0], []
    if heads is not None:
        own = draft_options or options
        return DraftPlan(ModelFile(path, replace(options, heads=True)), (), ModelFile(heads, own), copying)
    # A draft is small: a second context to read prompts gains little.
    last = replace(draft_options or ModelOptions(max_scored=DRAFT_SCORED), prompt_context=False)
    others = replace(last, max_scored=MAX_DRAFT + 1)  # they verify drafts of their own
    drafts = [ModelFile(file, last if file is files[-1] else others) for file in files]
    return DraftPlan(ModelFile(path, options), tuple(drafts), None, copying)


def known_draft(target: str | Path, find: Find = locate_model) -> str | None:
    """The draft that "auto" means for a target: one made here or listed, else its prediction heads; or None.

    Raises
    ------
    ModelFileError
        `find` has no such target, or it is not a model.
    """
    name = str(target)
    if (draft := find_draft(name)) is not None:
        return draft
    entry = None if is_path(name) else read_catalog().entries.get(name.partition(":")[0])
    if entry is not None and entry.heads is False:  # so it need not be on this machine
        return None
    return MTP if heads_in_file(find(target)).fault is None else None


def find_draft(target: str) -> str | None:
    """The name of the draft for a target: the newest that was made here, else a listed one."""
    try:
        drafts = made_drafts(locate_model(target))
    except ModelFileError:
        drafts = []
    return str(drafts[0].absolute()) if drafts else read_catalog().draft_of(target)


def made_path(target: Path, label: str) -> Path:
    """The path of a draft made here: beside its target, or in our cache folder if that is the hub's."""
    in_hub = any(part.startswith("models--") for part in target.absolute().parts)
    folder = cache_folder() / "drafts" if in_hub else target.parent
    return folder / f"{model_stem(target.name)}.draft-{label}.gguf"


def made_drafts(target: Path) -> list[Path]:
    """The drafts made for this target on this machine, newest first."""
    pattern = f"{escape(model_stem(target.name))}.draft-*.gguf"
    folders = {target.parent.absolute(), (cache_folder() / "drafts").absolute()}
    try:
        found = [path for folder in folders for path in folder.glob(pattern) if path.is_file()]
        wanted = file_identity(target) if found else ""
        fitting = [path for path in found if read_gguf(path).text(DRAFT_FOR) == wanted]
        return sorted(fitting, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    except (OSError, ValueError):  # ValueError: no path has such a name
        return []


@dataclass(eq=False, slots=True)
class Stage:
    """A draft model that has a draft of its own."""

    models: Sequence[LlamaModel]  # itself, its draft, the draft of that, and so on
    sources: frozenset[Source]  # of the tokens that it verifies
    length: LengthPolicy  # how many of them to draft, for all sequences


def stages_of(drafts: Sequence[LlamaModel], *, copies: bool) -> tuple[Stage, ...]:
    """The stages of a chain of draft models: each drafts for the previous one, the first for the target.

    With `copies`, a stage first verifies tokens copied from earlier text, then asks its draft.
    """
    stages = []
    for i in range(len(drafts) - 1):
        model = Source.MODEL if i == len(drafts) - 2 else Source.STAGE
        sources = frozenset({model, Source.NGRAM} if copies else {model})
        stages.append(Stage(drafts[i:], sources, AutoLength(sources=sources)))
    return tuple(stages)


def draft_name(level: int) -> str:
    """The name of a draft in requests; level 0 is the target's."""
    return DRAFT if level == 0 else f"{DRAFT}-{level + 1}"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceDrafters:
    """Makes the drafters of each sequence of a pair."""

    target: LlamaModel
    drafts: Sequence[LlamaModel]
    stages: Sequence[Stage]
    heads: PredictionHeads | None  # the target's, in place of a draft
    common: CommonTokens | None  # if the draft's vocabulary is not the target's
    copying: Copying

    def make(self, config: Speculation, prediction: TokenArray = NO_TOKENS) -> Drafter:
        """Return the drafter of a sequence, made of everything that can draft for it.

        Drafts are trees if the length policy, both models and the rule allow it. Draft tokens are also copied
        from `prediction`.
        """
        drafters: list[Drafter] = []
        has_model = bool(self.drafts) or self.heads is not None
        is_weighed = self.copying is Copying.WEIGHED and has_model
        copies = prompt_reading(config.length) is not None if is_weighed else self.copying is not Copying.OFF
        if copies or len(prediction):
            least = MIN_MATCH_BESIDE_MODEL if is_weighed else MIN_MATCH
            is_end = self.target.vocabulary.is_end
            drafters.append(NgramDrafter(least, prediction=prediction, is_end=is_end))
        if self.stages:
            drafters.append(self._cascaded(config))
        elif has_model:
            drafters.append(self.asking_model(config))
        if config.constraint is not None:
            drafters.append(ForcedDrafter(config.constraint, len(config.prompt)))
        return drafters[0] if len(drafters) == 1 else FallbackDrafter(drafters)

    def asking_model(self, config: Speculation) -> ModelDrafter:
        """Return the drafter that uses only the draft model, or the target's prediction heads."""
        if self.heads is not None:
            return self._asking(self.heads, config, MTP, source=Source.MTP, longest=self.heads.longest)
        draft, length, settings = self.drafts[0], config.length, dict[str, Any]()
        if (reading := prompt_reading(length)) is not None:
            settings |= {"reading": reading, "n_cached": draft.n_cached}
        has_trees = isinstance(length, TreeLength) and config.rule.name == Coupled.name
        if has_trees and not (self.target.keeps_states or draft.keeps_states):  # states are of one branch
            settings |= {"kind": TreeDrafter, "trees": length}
        return self._asking(draft, config, **settings)

    def _cascaded(self, config: Speculation, level: int = 0) -> Drafter:
        """Return the drafter of a draft model, with everything that drafts for it."""
        model = self._asking(self.drafts[level], config, draft_name(level))
        if level == len(self.stages):
            return model
        stage, streams = self.stages[level], CascadeStreams(config.streams)
        helper = self._cascaded(replace(config, streams=streams), level + 1)
        if Source.NGRAM in stage.sources:
            copies = NgramDrafter(is_end=self.target.vocabulary.is_end)
            helper = FallbackDrafter([copies, helper])
        length = stage.length.start_sequence(drops=config.rule.drops)
        return CascadeDrafter(model, helper, length, streams, self.drafts[level].max_scored)

    def _asking(
        self,
        asked: LlamaModel | PredictionHeads,
        config: Speculation,
        name: str = DRAFT,
        *,
        kind: type[ModelDrafter] = ModelDrafter,
        **settings: Any,
    ) -> ModelDrafter:
        return kind(
            asked.vocabulary_size,
            asked.context_size,
            config.sampling,
            config.rule,
            config.streams,
            n_tokens=self.target.vocabulary_size,
            model=name,
            tokens=self.common,
            n_prompt=len(config.prompt),
            constraint=config.constraint,
            **settings,
        )
