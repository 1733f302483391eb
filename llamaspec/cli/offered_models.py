"""The models that a server offers, and their names: those named on the command line, or all at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath

from llamaspec.catalog import Entry, read_catalog
from llamaspec.cli.model_options import (
    ModelChoice,
    ModelChoices,
    fetched_model,
)
from llamaspec.cli.output import OTHER_DRAFT, say
from llamaspec.cli.served_embedder import ServedEmbedder
from llamaspec.cli.served_models import Served, Serving, kind_of, refusal_of
from llamaspec.errors import (
    LlamaspecError,
    ModelFileError,
    printable,
)
from llamaspec.files import model_stem
from llamaspec.folder import fitting_drafts, model_files
from llamaspec.hub import RemoteFile, fetched_models, find_here, names_on_hub
from llamaspec.llama.file_facts import EMBEDDERS
from llamaspec.llama.gguf_file import check_gguf
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.resources import default_store_bytes
from llamaspec.measure.machine import room_for_models
from llamaspec.model_names import distinct
from llamaspec.plan import AUTO, draft_here
from llamaspec.serve import ServeSettings
from llamaspec.serve.log import Write
from llamaspec.serve.models import Models, Pull
from llamaspec.serve.served_model import ModelSource

DEMO = "demo"  # the name of the embedded pair


def _source(
    name: str,
    path: Path,
    choice: ModelChoice,
    serving: Serving,
    aliases: Sequence[str] = (),
    beside: Path | None = None,
) -> ModelSource:
    kind = kind_of(path)
    served: Served | ServedEmbedder
    if kind in EMBEDDERS:
        served = ServedEmbedder(choice, serving.ctx_per_request)
    else:
        served = Served(choice, serving, beside=beside)
    return ModelSource(
        printable(name), path, served.open, served.needed_bytes, tuple(aliases), beside=beside,
        refusal=refusal_of(path), kind=kind,
    )  # fmt: skip


def served_models(
    models: ModelChoices,
    folder: Path | None,
    serving: Serving,
    settings: ServeSettings,
    write: Write,
    pull: Pull | None = None,
) -> Models:
    """Return the models of a server: those that the command line names, or all at hand.

    The only model that it names answers requests with any name. If nothing is at hand and nothing can be
    downloaded, the embedded pair does. ModelFileError if there is no such model, ValueError if an option is
    wrong.
    """
    if folder is not None and not folder.is_dir():
        raise ModelFileError(f"{folder} is no folder; name the folder of your models with --models-dir")
    if folder is not None and models.draft_file is not None and not models.targets:
        raise ValueError("--draft names the draft of one target; name that with --target, too")
    _check_room(models.first, serving)
    is_one = len(models.targets) == 1 and folder is None
    if not is_one:
        store = serving.store or PrefixStore(default_store_bytes(0))
        serving = replace(serving, store=store)
        named, tell = named_sources(models, serving), cache(say)  # each line once
        say_pairs = cache(_say_pairs)

        def find() -> list[ModelSource]:
            listed = [] if named else listed_sources(models, serving)
            found = found_sources(folder, models, serving, with_fetched=not named)
            sources = without_repetition([*named, *listed], found, tell)
            say_pairs(tuple((each.name, each.path, each.beside) for each in sources if each.beside))
            return sources

        if folder is not None and all(map(refusal_of, model_files(folder))):
            say(f"there is no model in {folder}; put GGUF files there, or name another folder")
        if models.targets or pull is not None or any(each.refusal is None for each in find()):
            if settings.alias is not None:
                raise ValueError("--alias names a single target; use --target NAME=FILE")
            if settings.memory_bytes is None:
                room = room_for_models() - store.limit
                settings = replace(settings, memory_bytes=max(0, room))
            return Models(find, settings, write, pull=pull)
    name = models.targets[0][0] if is_one else None
    source = _only_source(settings.alias or name, models.first, serving)
    return Models(lambda: [source], settings, write, any_name=True)


def _check_room(choice: ModelChoice, serving: Serving) -> None:
    """Raise ValueError if a request may have more tokens than the KV cache."""
    n_ctx, per_request = choice.target_options.n_ctx, serving.ctx_per_request
    if n_ctx is not None and per_request is not None and per_request > n_ctx:
        raise ValueError(
            f"--ctx-per-request {per_request} is more than --n-ctx {n_ctx}, which all requests share"
        )


def _only_source(name: str | None, choice: ModelChoice, serving: Serving) -> ModelSource:
    """Return the only model of a server, which is loaded when the server starts."""
    path, served = fetched_model(choice.target), Served(choice, serving, is_alone=True)
    name = printable(name or (DEMO if choice.is_embedded else path.stem))
    if (kind := kind_of(path)) in EMBEDDERS:
        embedder = ServedEmbedder(choice, serving.ctx_per_request, stays=True)
        return ModelSource(name, path, embedder.open, embedder.needed_bytes, stays=serving.stays, kind=kind)
    served.plan()  # fails now, not after the address is open
    return ModelSource(name, path, served.open, served.needed_bytes, stays=serving.stays)


def named_sources(models: ModelChoices, serving: Serving) -> list[ModelSource]:
    """Return the models that the command line names, fetching those that are not here.

    ModelFileError if there is no such model, it generates no text, or two have the same name.
    """
    if models.draft_file is not None:
        check_gguf(fetched_model(models.draft_file))
    found: dict[str, ModelSource] = {}
    for alias, target in models.targets:
        check_gguf(path := fetched_model(target))
        entry = read_catalog().named(target)
        name = alias or (model_stem(path.name) if entry is None else entry.name)
        if (reason := refusal_of(path)) is not None:
            raise ModelFileError(f"{path} {reason}")
        if name in found:
            raise ModelFileError(f"two models are called {name}; name one with --target NAME={target}")
        found[name] = _source(name, path, models.of(target), serving)
    return list(found.values())


def listed_sources(models: ModelChoices, serving: Serving) -> list[ModelSource]:
    """Return the models of the lists that are on this machine."""
    return [
        _source(name, path, models.of(name), serving, aliases)
        for entry in read_catalog().entries.values()
        for name, (path, aliases) in _files_here(entry).items()
    ]


@dataclass(frozen=True, slots=True)
class _Found:
    """A model that was found on this machine; no list names it."""

    source: ModelSource
    names: Sequence[str]  # ever longer ones, to tell it from others


def found_sources(
    folder: Path | None, models: ModelChoices, serving: Serving, *, with_fetched: bool = True
) -> list[_Found]:
    """Return the models of a folder and those that were fetched from the hub, listed or not."""
    fetched = list(fetched_models()) if with_fetched else []
    paths = [] if folder is None else model_files(folder)
    drafts = fitting_drafts([*(path for _, path in fetched), *paths])

    def found(path: Path, called: str, names: Sequence[str], aliases: Sequence[str] = ()) -> _Found:
        choice = models.of(called)
        beside = drafts.get(path) if choice.draft in (None, AUTO) and not choice.no_draft else None
        return _Found(_source(names[0], path, choice, serving, aliases, beside), names)

    return [
        *(found(path, str(file), *_names_on_hub(file)) for file, path in fetched),
        *(found(path, str(path), _names_in(folder, path)) for path in paths if folder is not None),
    ]


def _names_on_hub(file: RemoteFile) -> tuple[Sequence[str], Sequence[str]]:
    """Return ever longer names of a file that was fetched, and its names on the hub."""
    name, *on_hub = names_on_hub(file)
    owner, in_repo = file.repo.partition("/")[0], PurePosixPath(file.file).parent / name
    names = [name, f"{owner}/{name}", f"{file.repo}/{in_repo}"]
    return names, on_hub


def _names_in(folder: Path, path: Path) -> Sequence[str]:
    """Return ever longer names of a file in a folder."""
    parts = [folder.absolute().name, *path.relative_to(folder).parts[:-1], model_stem(path.name)]
    return [printable("/".join(parts[-n:])) for n in range(1, len(parts) + 1)]


def _say_pairs(pairs: Sequence[tuple[str, Path, Path]]) -> None:
    """Say which of these models have a draft only because it lies beside them."""
    told = [
        f"{name} with {printable(model_stem(draft.name))}"
        for name, path, draft in pairs
        if draft_here(path, path) is None
    ]
    if told:
        say(f"paired, because their tokens and sizes fit: {', '.join(told)}; {OTHER_DRAFT}")


def without_repetition(
    named: Sequence[ModelSource], found: Sequence[_Found], tell: Callable[[str], object] = say
) -> list[ModelSource]:
    """Return all models once: by name, and those that were only found on this machine by file, too.

    Several names may have one file, with other options. Of the models that were found, several with one name
    get longer ones, and `tell` gets a line about them.
    """
    sources: dict[str, ModelSource] = {}
    for source in named:
        sources.setdefault(source.name, source)
    known = {_file_of(source.path) for source in named}
    new: dict[object, _Found] = {}
    for each in found:
        if (file := _file_of(each.source.path)) not in known:
            new.setdefault(file, each)
    usable = [each for each in new.values() if each.source.refusal is None]
    names = distinct([each.names for each in usable], sources.keys())
    others: dict[str, list[str]] = {}
    for each, name in zip(usable, names, strict=True):
        if name != each.source.name:
            others.setdefault(each.source.name, []).append(name)
        sources.setdefault(name, replace(each.source, name=name))
    for name, several in others.items():
        tell(f"several models are called {name}; these are offered as {', '.join(several)}")
    refused = [each.source for each in new.values() if each.source.refusal is not None]
    return [*sources.values(), *refused]


def _file_of(path: Path) -> object:
    """Return what all names of a file have in common."""
    try:
        found = path.stat()
    except OSError:
        return path
    return found.st_dev, found.st_ino


def _files_here(entry: Entry) -> Mapping[str, tuple[Path, Sequence[str]]]:
    """Return the files of an entry that are on this machine, with other names of each, by their names."""
    with suppress(LlamaspecError):
        if entry.path is not None:
            path = entry.own_file()
            return {entry.name: (path, [])} if path.is_file() else {}
        found: dict[str, tuple[Path, Sequence[str]]] = {}
        for quantization in dict.fromkeys([entry.default, *entry.quantizations]):
            path_here = find_here(entry.file(quantization))
            if path_here is not None:
                is_default = quantization == entry.default
                full = f"{entry.name}:{quantization}"
                on_hub = f"hf.co/{entry.repo}"
                others = [f"{on_hub}:{quantization}", *([full, on_hub] if is_default else [])]
                found[entry.name if is_default else full] = (path_here, others)
        return found
    return {}
