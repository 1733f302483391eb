"""Where the draft tokens for a target come from: decided once, by `make_plan`, before a model is loaded.

The commands, `open_pair` and the server all start from a `DraftPlan`. No later step resolves a name or
decides again. tests/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path

from llamaspec.catalog import is_path, locate_model, read_catalog, resolve_model
from llamaspec.errors import ModelFileError, PairError, quoted
from llamaspec.files import cache_folder, file_identity, model_stem
from llamaspec.llama.gguf_file import file_parts, kv_row_sizes, read_gguf
from llamaspec.llama.nextn import check_heads, heads_in_file, is_shared_head
from llamaspec.llama.options import DEFAULT_CONTEXT, DRAFT_SCORED, MAX_DRAFT, ModelOptions, cache_bytes
from llamaspec.values import MTP, Copying

AUTO = "auto"  # given as a draft: the one that is known for the target
NGRAM = "ngram"  # given as a draft: only copies of earlier text
DRAFT_FOR = "llamaspec.draft_for"  # metadata of a draft made on this machine: the identity of its target
Find = Callable[[str | Path], Path]  # returns the file of a name


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that is not loaded."""

    path: Path
    options: ModelOptions


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A target and where its draft tokens come from: draft models or prediction heads, not both."""

    target: ModelFile
    drafts: tuple[ModelFile, ...] = ()  # the first drafts for the target, each other one for the previous one
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
        """Whether nothing drafts: plain decoding."""
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
    """Turn names and options into a plan, reading only the metadata of files.

    Parameters
    ----------
    target, draft
        As for `open_pair`.
    find : callable
        Returns the file of a name. `locate_model` downloads nothing.

    Raises
    ------
    PairError
        The target has no known draft or no prediction heads, or the drafts cannot be combined.
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
    last = draft_options or ModelOptions(max_scored=DRAFT_SCORED)
    others = replace(last, max_scored=MAX_DRAFT + 1)  # each verifies the drafts of the next
    drafts = [ModelFile(file, last if file is files[-1] else others) for file in files]
    return DraftPlan(ModelFile(path, options), tuple(drafts), None, copying)


def estimated_bytes(plan: DraftPlan) -> int:
    """Return an estimate of the memory that a plan takes once it is loaded: weights and KV caches.

    Weights are mapped, but evaluations are fast only while they are in memory. ModelFileError if a file
    cannot be read.
    """
    files = [plan.target, *plan.drafts]
    if plan.heads is not None and not plan.has_own_heads:
        files.append(plan.heads)
    try:
        return sum(_estimated_bytes(file.path, file.options) for file in files)
    except OSError as error:
        raise ModelFileError(f"cannot read {error.filename}: {error.strerror}; check the path") from error


def _estimated_bytes(path: Path, options: ModelOptions) -> int:
    n_weights = sum(part.stat().st_size for part in file_parts(path))
    key_bytes, value_bytes = cache_bytes(options.cache_type_k), cache_bytes(options.cache_type_v)
    rows = kv_row_sizes(read_gguf(path))
    per_token = sum(n_key * key_bytes + n_value * value_bytes for n_key, n_value in rows)
    return n_weights + round(per_token * max(options.n_ctx or DEFAULT_CONTEXT, options.n_cells or 0))


def known_draft(target: str | Path, find: Find = locate_model) -> str | None:
    """Return the draft that "auto" means: one made here or listed, else "mtp" for its own heads, else None.

    Raises
    ------
    ModelFileError
        `find` has no such target, or it is not a model.
    """
    name = str(target)
    if (draft := find_draft(name)) is not None:
        return draft
    entry = None if is_path(name) else read_catalog().entries.get(name.partition(":")[0])
    if entry is not None and entry.heads is False:  # the target need not be on this machine
        return None
    return MTP if heads_in_file(find(target)).fault is None else None


def find_draft(target: str) -> str | None:
    """Return the newest draft that was made on this machine for a target, else the listed one, or None."""
    try:
        drafts = made_drafts(locate_model(target))
    except ModelFileError:
        drafts = []
    return str(drafts[0].absolute()) if drafts else read_catalog().draft_of(target)


def made_path(target: Path, label: str) -> Path:
    """Return the path of a new draft: beside its target, but in our cache folder if that is the hub's."""
    in_hub = any(part.startswith("models--") for part in target.absolute().parts)
    folder = cache_folder() / "drafts" if in_hub else target.parent
    return folder / f"{model_stem(target.name)}.draft-{label}.gguf"


def made_drafts(target: Path) -> list[Path]:
    """Return the drafts made for this target on this machine, newest first."""
    pattern = f"{escape(model_stem(target.name))}.draft-*.gguf"
    folders = {target.parent.absolute(), (cache_folder() / "drafts").absolute()}
    try:
        found = [path for folder in folders for path in folder.glob(pattern) if path.is_file()]
        wanted = file_identity(target) if found else ""
        fitting = [path for path in found if read_gguf(path).text(DRAFT_FOR) == wanted]
        return sorted(fitting, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    except (OSError, ValueError):  # ValueError: no path has such a name
        return []
