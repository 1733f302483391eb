"""Where the draft tokens for a target come from: decided once, by `make_plan`, before a model is loaded.

`make_plan` turns names and options into a `DraftPlan`. The commands, `open_pair` and the server all start
from one; nothing after that resolves a name or decides again. tests/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llamaspec.catalog import quoted
from llamaspec.errors import PairError
from llamaspec.hub import AUTO, find_draft, locate_model, may_have_heads, resolve_model
from llamaspec.llama.nextn import check_heads, heads_in_file, is_shared_head
from llamaspec.llama.options import DRAFT_SCORED, MAX_DRAFT, ModelOptions
from llamaspec.values import MTP, Copying

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
    last = replace(draft_options or ModelOptions(max_scored=DRAFT_SCORED), reads_apart=False)
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
    draft = find_draft(str(target))
    if draft is None and may_have_heads(str(target)) and heads_in_file(find(target)).fault is None:
        return MTP
    return draft
