"""Where the draft tokens for a target come from: decided once, by `make_plan`, before a model is loaded.

The commands, `open_pair` and the server all start from a `DraftPlan`. No later step resolves a name or
decides again. tests/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamaspec.catalog import locate_model, read_catalog, resolve_model
from llamaspec.errors import ModelFileError, PairError, quoted
from llamaspec.files import file_identity
from llamaspec.hub import is_path
from llamaspec.llama.devices import free_gpu_bytes
from llamaspec.llama.gguf_file import file_parts, needs_target
from llamaspec.llama.options import DRAFT_SCORED, ModelOptions
from llamaspec.llama.resources import available_bytes
from llamaspec.values import MTP, Copying

if TYPE_CHECKING:
    from llamaspec.llama.hidden_draft_file import HiddenDraftFile
    from llamaspec.llama.model import Longest

AUTO = "auto"  # given as a draft: the one that is known for the target
NGRAM = "ngram"  # given as a draft: only copies of earlier text
NONE = "none"  # given as a draft: no draft model
Find = Callable[[str | Path], Path]  # returns the file of a name


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that is not loaded."""

    path: Path
    options: ModelOptions

    @property
    def identity(self) -> str:
        """What identifies the file that lies there now; an open model keeps its own."""
        return file_identity(self.path)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A target and where its draft tokens come from: a draft model or prediction heads, not both."""

    target: ModelFile
    draft: ModelFile | None = None
    heads: ModelFile | None = None  # prediction heads: in the target's file, or in a file of their own
    copying: Copying = Copying.WEIGHED
    hidden_draft: HiddenDraftFile | None = None  # what heads in a file of their own are, if they read rows
    is_default: bool = False  # nobody asked for the draft: if it cannot be loaded, the target runs without
    longest: Longest | None = None  # returns the tokens of the longest sequence, with the target's weights

    def __post_init__(self) -> None:
        if self.draft is not None and self.heads is not None:
            raise ValueError("a target has a draft model or prediction heads, not both")

    @property
    def has_own_heads(self) -> bool:
        """Whether the heads are in the target's file."""
        return self.heads is not None and self.heads.path == self.target.path

    @property
    def without_draft(self) -> DraftPlan:
        """The same target without a draft model or prediction heads."""
        options = replace(self.target.options, heads=False, hidden_layers=())
        target = ModelFile(self.target.path, options)
        return DraftPlan(target, copying=self.copying, longest=self.longest)

    @property
    def has_room(self) -> bool:
        """Whether the memory that is free now has room for the weights."""
        files = {file.path for file in (self.target, self.draft, self.heads) if file is not None}
        try:
            return weights_bytes(files) <= available_bytes() + free_gpu_bytes()
        except OSError:  # loading the model will say what is wrong
            return False

    @property
    def models(self) -> tuple[ModelFile, ...]:
        """The target and, if there is one, the draft model."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def is_plain(self) -> bool:
        """Whether nothing drafts: plain decoding."""
        return self.draft is None and self.heads is None and self.copying is Copying.OFF


def make_plan(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    by_default: bool = False,
    beside: Path | None = None,
    needs_room: bool = True,
    copying: Copying = Copying.WEIGHED,
    target_options: ModelOptions | None = None,
    draft_options: ModelOptions | None = None,
    find: Find = resolve_model,
) -> DraftPlan:
    """Turn names and options into a plan, reading only the metadata of files.

    Parameters
    ----------
    target, draft
        As for `open_pair`.
    by_default : bool
        Without a draft, use `draft_here`.
    beside : Path, optional
        The draft that is used by default if none is known.
    needs_room : bool
        Use it only if memory has room for it now.
    find : callable
        Returns the file of a name. `locate_model` downloads nothing.

    Raises
    ------
    PairError
        The target has no known draft or no prediction heads.
    ModelFileError
        There is no such model.
    """
    if draft == AUTO:
        draft = known_draft(target, find)
        if draft is None:
            raise PairError(f"no draft is known for {quoted(str(target))}; name one, or leave the draft out")
    path, options = find(target), target_options or ModelOptions()
    if by_default and draft is None and (here := draft_here(target, path) or beside) is not None:
        with suppress(PairError):  # a listed draft may have been made for another version of the target
            plan = make_plan(
                path, here, copying=copying, target_options=options, draft_options=draft_options,
                find=locate_model,
            )  # fmt: skip
            if plan.has_room or not needs_room:
                return replace(plan, is_default=True)
    target_file = ModelFile(path, options)
    if draft == MTP:
        return _plan_hidden_draft(target_file, ModelFile(path, draft_options or options), copying)
    if draft == NGRAM:
        copying = Copying.ON
    if draft in (None, NONE, NGRAM):
        return DraftPlan(target_file, copying=copying)
    file = find(draft)
    if needs_target(file):
        return _plan_hidden_draft(target_file, ModelFile(file, draft_options or options), copying)
    small = ModelFile(file, draft_options or ModelOptions(max_scored=DRAFT_SCORED, kernels=options.kernels))
    return DraftPlan(target_file, small, copying=copying)


def _plan_hidden_draft(target: ModelFile, heads: ModelFile, copying: Copying) -> DraftPlan:
    """Return the plan for a draft that reads hidden rows: in the target's file, or in a file of its own.

    PairError if llama.cpp cannot compute it, or if it was made for another target.
    """
    from llamaspec.llama.hidden_draft_file import check_heads, check_shared_head, check_target, hidden_draft

    def reading(**options: Any) -> ModelFile:
        return ModelFile(target.path, replace(target.options, **options))

    if heads.path == target.path:
        check_heads(target.path)
    elif (draft := hidden_draft(heads.path)) is not None:
        check_target(draft, target.path)
        return DraftPlan(reading(hidden_layers=draft.layers), None, heads, copying, draft)
    else:
        check_shared_head(heads.path, target.path)
    return DraftPlan(reading(heads=True), None, heads, copying)


def known_draft(target: str | Path, find: Find = locate_model) -> str | None:
    """Return the draft that "auto" means: the listed one, else "mtp" for its own heads, else None.

    Raises
    ------
    ModelFileError
        `find` has no such target, or it is not a model.
    """
    name = str(target)
    if (draft := read_catalog().draft_of(name)) is not None:
        return draft
    entry = None if is_path(name) else read_catalog().named(name)
    if entry is not None and entry.heads is False:  # the target need not be on this machine
        return None
    from llamaspec.llama.hidden_draft_file import heads_in_file

    return MTP if heads_in_file(find(target)).fault is None else None


def draft_here(target: str | Path, path: Path) -> str | None:
    """Return the known draft of a target if no download is needed, else None.

    `path` is the target's file. The draft is named as by `known_draft`.
    """
    try:
        name = known_draft(target, lambda _: path)
        is_here = name in (None, MTP) or locate_model(str(name)).is_file()
        return name if is_here else None
    except (ModelFileError, OSError):  # loading the model will say what is wrong
        return None


def weights_bytes(paths: Iterable[Path]) -> int:
    """Return the size of model files with all their parts; may raise OSError."""
    return sum(part.stat().st_size for path in paths for part in file_parts(path))
