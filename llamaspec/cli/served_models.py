"""The models that a server offers: those named on the command line, those at hand, and how each is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from llamaspec.catalog import Entry, defaults_of, locate_model, read_catalog
from llamaspec.chat.template import ChatTemplate
from llamaspec.cli.model_options import (
    ModelChoice,
    ModelChoices,
    check_files,
    fetched_model,
    find_plan,
    reporting,
)
from llamaspec.cli.options import CHAT_TEMPLATE
from llamaspec.cli.output import SlowProgress, say
from llamaspec.defaults import Defaults
from llamaspec.engine.scheduler import MARGIN
from llamaspec.errors import ConstraintError, LlamaspecError, ModelFileError, NoTemplateError, printable
from llamaspec.files import model_stem, part_names
from llamaspec.hub import fetched_models, find_here
from llamaspec.llama.devices import leaves_main_memory
from llamaspec.llama.file_facts import file_facts, needed_bytes
from llamaspec.llama.gguf_file import PARTS, check_gguf
from llamaspec.llama.model import default_store_bytes
from llamaspec.llama.options import DEFAULT_CONTEXT
from llamaspec.llama.prefix_folder import PrefixFolder, prefix_key, store_finished
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.resources import available_bytes, give_back_memory
from llamaspec.llama.weights import LoadProgress
from llamaspec.measure.machine import room_for_models
from llamaspec.opening import Drafting, open_plan
from llamaspec.pair import Pair
from llamaspec.plan import AUTO, DraftPlan, ModelFile
from llamaspec.serve import ServeSettings
from llamaspec.serve.log import Write
from llamaspec.serve.model_names import quantization_of
from llamaspec.serve.models import Models, Pull
from llamaspec.serve.served_model import ModelSource
from llamaspec.serve.service import OpenModel

_NO_MODELS = PARTS | {"clip"}  # architectures of files that generate no text alone
DEMO = "demo"  # the name of the embedded pair


@dataclass(frozen=True, slots=True)
class Serving:
    """What the options of a server say about each of its models."""

    drafting: Drafting
    parallel: int
    ctx_per_request: int | None = None
    chat_template: str | None = None
    store: PrefixStore | None = None  # whose limit all models share; None = a limit for the only one
    cache_folder: Path | None = None  # of saved prefixes
    cache_folder_bytes: int = 0
    stays: bool = True  # the only model of a server stays loaded


@dataclass(frozen=True)
class Served:
    """A model to serve. `is_alone`: it is loaded when the server starts, and stays."""

    choice: ModelChoice
    serving: Serving
    is_alone: bool = False

    @cached_property
    def plan(self) -> DraftPlan:
        """What drafts for it. If there are several models, nothing is fetched, and drafts are optional."""
        choice = self.choice
        if self.is_alone:
            plan = find_plan(choice)
        else:
            draft = None if choice.draft == AUTO else choice.draft  # by default, one that is on this machine
            plan = find_plan(replace(choice, draft=draft), locate_model)
        return _with_room(plan, choice, self.serving, self.defaults.n_ctx)

    @cached_property
    def defaults(self) -> Defaults:
        """The options that the lists give for it."""
        return defaults_of(self.choice.target)

    def needed_bytes(self) -> int:
        """Return an estimate of the memory that it takes once it is loaded; ModelFileError if that fails."""
        plan = self.plan
        heads = [] if plan.heads is None or plan.has_own_heads else [plan.heads]
        try:
            return sum(
                needed_bytes(file.path, file.options, self.serving.parallel)
                for file in (*plan.models, *heads)
            )
        except OSError as error:
            raise ModelFileError(f"cannot read {error.filename}: {error.strerror}; check the path") from error

    @contextmanager
    def open(self, on_load: LoadProgress) -> Iterator[OpenModel]:
        """Load it, with its saved prefixes; at the end, save these and what was learnt about the pair."""
        serving, stays = self.serving, self.is_alone and self.serving.stays
        self._free_memory()
        folder = None
        if serving.cache_folder is not None:
            folder = PrefixFolder(serving.cache_folder, serving.cache_folder_bytes)
        if stays:
            opening: AbstractContextManager[Pair] = reporting(
                self.plan, self.choice, serving.drafting, serving.store
            )
        else:
            check_files(self.plan)
            opening = open_plan(self.plan, serving.drafting, store=serving.store, on_load=on_load, notify=say)
        with opening as pair, _stored(pair, leaves=serving.store is not None), _prefixes(folder, pair):
            if stays:
                with SlowProgress("preparing the server"), suppress(ConstraintError):
                    pair.json_schema({})  # prepares the vocabulary before the first request with a schema
            template = _template(pair, serving.chat_template or self._own_template())
            yield OpenModel(
                pair, pair.length, template, self.defaults.sampling, self.defaults.reasoning_budget
            )

    def _free_memory(self) -> None:
        """Drop what unloaded models have left in the store if this model needs its memory."""
        store = self.serving.store
        if store is None or not store.n_left or leaves_main_memory(self.plan.target.options):
            return
        n_missing = self.needed_bytes() - available_bytes()
        if n_missing > 0 and store.drop_left(n_missing):
            give_back_memory()

    def _own_template(self) -> str | None:
        """Return the chat template that the lists give; PromptError if it cannot be read."""
        path = self.defaults.given.get("chat_template")
        return None if path is None else CHAT_TEMPLATE.convert(path, None, None)


def _check_room(choice: ModelChoice, serving: Serving) -> None:
    """Raise ValueError if a request may have more tokens than the KV cache."""
    n_ctx, per_request = choice.target_options.n_ctx, serving.ctx_per_request
    if n_ctx is not None and per_request is not None and per_request > n_ctx:
        raise ValueError(
            f"--ctx-per-request {per_request} is more than --n-ctx {n_ctx}, which all requests share"
        )


def _with_room(plan: DraftPlan, choice: ModelChoice, serving: Serving, n_usual: int | None) -> DraftPlan:
    """Return the plan with one KV cache that all requests share.

    `n_usual` is the context of a request if the command line gives none.
    """
    n_ctx = choice.target_options.n_ctx
    per_request = serving.ctx_per_request or n_ctx or n_usual
    n_cells = n_ctx or ((per_request or DEFAULT_CONTEXT) + MARGIN) * serving.parallel

    def roomy(file: ModelFile, n_ctx: int | None) -> ModelFile:
        return replace(file, options=replace(file.options, n_ctx=n_ctx, n_cells=n_cells))

    draft = plan.draft and roomy(plan.draft, choice.draft_options.n_ctx or per_request)
    return replace(plan, target=roomy(plan.target, per_request), draft=draft)


@contextmanager
def _stored(pair: Pair, *, leaves: bool) -> Iterator[None]:
    """Begin with what the models have left in the store that all share, and leave it there again at the end.

    What heads have stored is freed, and everything unless `leaves`.
    """
    keys = [prefix_key(model) for model in (pair.target, *pair.models)]
    stores = {f"{keys[0]} {key}": model.store for key, model in zip(keys[1:], pair.models, strict=True)}

    def take() -> None:
        for key, store in stores.items():
            store.take(key)

    def end() -> None:
        for store in () if pair.heads is None else pair.heads.stores:
            store.close()
        for key, store in stores.items():
            if leaves:
                store.leave(key)
            else:
                store.close()

    pair.call(take)
    try:
        yield
        if leaves:
            for model in pair.models:
                store_finished(model, pair.call)
    finally:
        pair.call(end)


@contextmanager
def _prefixes(folder: PrefixFolder | None, pair: Pair) -> Iterator[None]:
    """Load stored prefixes on entry, save new ones meanwhile, and all on exit."""
    if folder is None:
        yield
        return
    with folder.keeping(pair.models, say, pair.call):
        yield
    with SlowProgress("saving prefixes"):
        folder.save(pair.models, say, pair.call)


def _template(pair: Pair, source: str | None) -> ChatTemplate | None:
    try:
        return ChatTemplate.of(pair.target, source)
    except NoTemplateError:
        name = printable(pair.target.path.name)
        say(f"{name} has no chat template, so it can only continue text; name one with --chat-template")
        return None


# Which models there are


def _source(
    name: str, path: Path, choice: ModelChoice, serving: Serving, aliases: Sequence[str] = ()
) -> ModelSource:
    served = Served(choice, serving)
    return ModelSource(printable(name), path, served.open, served.needed_bytes, tuple(aliases))


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
        named = named_sources(models, serving)

        def find() -> list[ModelSource]:
            listed = [] if named else listed_sources(models, serving)
            fetched = [] if named else fetched_sources(models, serving)
            in_folder = [] if folder is None else folder_sources(folder, models, serving)
            return without_repetition([*named, *listed], [*fetched, *in_folder])

        if folder is not None and not folder_sources(folder, models, serving):
            say(f"there is no model in {folder}; put GGUF files there, or name another folder")
        if models.targets or pull is not None or find():
            if settings.alias is not None:
                raise ValueError("--alias names a single target; use --target NAME=FILE")
            if settings.memory_bytes is None:
                room = room_for_models() - store.limit
                settings = replace(settings, memory_bytes=max(0, room))
            return Models(find, settings, write, pull=pull)
    name = models.targets[0][0] if is_one else None
    source = _only_source(settings.alias or name, models.first, serving)
    return Models(lambda: [source], settings, write, any_name=True)


def _only_source(name: str | None, choice: ModelChoice, serving: Serving) -> ModelSource:
    """Return the only model of a server, which is loaded when the server starts."""
    served = Served(choice, serving, is_alone=True)
    path = served.plan.target.path
    name = printable(name or (DEMO if choice.is_embedded else path.stem))
    return ModelSource(name, path, served.open, served.needed_bytes, stays=serving.stays)


def named_sources(models: ModelChoices, serving: Serving) -> list[ModelSource]:
    """Return the models that the command line names, fetching those that are not here.

    ModelFileError if there is no such model, or two have the same name.
    """
    if models.draft_file is not None:
        check_gguf(fetched_model(models.draft_file))
    found: dict[str, ModelSource] = {}
    for alias, target in models.targets:
        check_gguf(path := fetched_model(target))
        name = alias or (target if target in read_catalog().entries else model_stem(path.name))
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
        if _generates(path)
    ]


def fetched_sources(models: ModelChoices, serving: Serving) -> list[ModelSource]:
    """Return the models that were fetched from the hub, listed or not."""
    found = []
    for file, path in fetched_models():
        name, on_hub = model_stem(Path(file.file).name), f"hf.co/{file.repo}"
        aliases = (on_hub, f"{on_hub}:{quantization_of(name)}")
        if _generates(path):
            found.append(_source(name, path, models.of(str(file)), serving, aliases))
    return found


def folder_sources(folder: Path, models: ModelChoices, serving: Serving) -> list[ModelSource]:
    """Return the models of a folder and the folders in it, without drafts that were made on this machine."""
    paths = [path for path in sorted(folder.rglob("*.gguf")) if part_names(path.name)[0] == path.name]
    return [
        _source(model_stem(path.name), path, models.of(str(path)), serving)
        for path in paths
        if ".draft-" not in path.name and _generates(path)
    ]


def without_repetition(named: Sequence[ModelSource], found: Sequence[ModelSource]) -> list[ModelSource]:
    """Return all models once: by name, and those that were only found on this machine by file, too.

    Several names may have one file, with other options.
    """
    sources: dict[str, ModelSource] = {}
    for source in named:
        sources.setdefault(source.name, source)
    paths = {source.path.resolve() for source in named}
    for source in found:
        path = source.path.resolve()
        if source.name not in sources and path not in paths:
            paths.add(path)
            sources[source.name] = source
    return list(sources.values())


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


def _generates(path: Path) -> bool:
    """Whether a file seems to be a model that generates text alone."""
    try:
        architecture = file_facts(path).architecture
    except OSError:
        return False
    return bool(architecture) and architecture not in _NO_MODELS
