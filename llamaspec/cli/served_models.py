"""How a server opens each of its models, and what that needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from llamaspec.catalog import defaults_of, locate_model
from llamaspec.chat.builtin_templates import FALLBACK, builtin_template
from llamaspec.chat.template import ChatTemplate
from llamaspec.cli.model_options import (
    ModelChoice,
    find_plan,
    reporting,
)
from llamaspec.cli.options import CHAT_TEMPLATE
from llamaspec.cli.output import SlowProgress, say
from llamaspec.defaults import Defaults
from llamaspec.engine.scheduler import MARGIN
from llamaspec.errors import (
    ConstraintError,
    MemoryFullError,
    ModelFileError,
    NoTemplateError,
    printable,
)
from llamaspec.llama import runtime
from llamaspec.llama.devices import leaves_main_memory
from llamaspec.llama.file_facts import Kind, file_facts, needed_bytes
from llamaspec.llama.gguf_file import check_gguf
from llamaspec.llama.options import DEFAULT_CONTEXT
from llamaspec.llama.prefix_folder import PrefixFolder, prefix_key, store_finished
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.resources import available_bytes, give_back_memory
from llamaspec.llama.trial import ensure_tried
from llamaspec.llama.weights import LoadProgress
from llamaspec.measure.store import Notify, ignore_line
from llamaspec.opening import Drafting, open_plan
from llamaspec.pair import Pair
from llamaspec.plan import AUTO, DraftPlan, ModelFile
from llamaspec.serve.service import OpenModel


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
    beside: Path | None = None  # drafts for it by default if no draft is known

    def plan(self, *, needs_room: bool = True) -> DraftPlan:
        """Return what drafts for it now: a draft may arrive between two times that it is loaded.

        If there are several models, nothing is fetched, and drafts are optional. A draft that nobody asked
        for is left out if memory has no room for it now, unless not `needs_room`.
        """
        choice = self.choice
        if self.is_alone:
            plan = find_plan(choice, needs_room=needs_room)
        else:
            draft = None if choice.draft == AUTO else choice.draft  # by default, one that is on this machine
            choice = replace(choice, draft=draft)
            plan = find_plan(choice, locate_model, needs_room=needs_room, beside=self.beside)
        return _with_room(plan, choice, self.serving, self.defaults.n_ctx)

    @cached_property
    def defaults(self) -> Defaults:
        """The options that the lists give for it."""
        return defaults_of(self.choice.target)

    def needed_bytes(self) -> int:
        """Return an estimate of the memory that it takes once it is loaded.

        The files are checked first, because afterwards other models are unloaded for it. ModelFileError if it
        cannot be used.
        """
        plan = self.plan(needs_room=False)
        if (reason := refusal_of(plan.target.path)) is not None:
            raise ModelFileError(f"{plan.target.path} {reason}")
        files = _files(_checked(plan, ignore_line))
        try:
            return sum(
                needed_bytes(file.path, file.options, self.serving.parallel, is_draft=file is plan.draft)
                for file in files
            )
        except OSError as error:
            raise ModelFileError(f"cannot read {error.filename}: {error.strerror}; check the path") from error

    @contextmanager
    def open(self, on_load: LoadProgress, keeps_draft: bool = False) -> Iterator[OpenModel]:
        """Load it, with its saved prefixes; at the end, save these and what was learnt about the pair.

        With `keeps_draft`, MemoryFullError if there is no room for a draft that nobody asked for.
        """
        self._free_memory()
        plan = self.plan(needs_room=not keeps_draft)
        serving, stays = self.serving, self.is_alone and self.serving.stays
        folder = None
        if serving.cache_folder is not None:
            folder = PrefixFolder(serving.cache_folder, serving.cache_folder_bytes)
        if stays:
            opening: AbstractContextManager[Pair] = reporting(
                plan, self.choice, serving.drafting, serving.store
            )
        else:
            opening = open_plan(
                _checked(plan, say), serving.drafting, store=serving.store, on_load=on_load, notify=say,
                keeps_draft=keeps_draft,
            )  # fmt: skip
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
        if (
            store is None
            or not store.n_left
            or leaves_main_memory(self.plan(needs_room=False).target.options)
        ):
            return
        n_missing = self.needed_bytes() - available_bytes()
        if n_missing > 0 and store.drop_left(n_missing):
            give_back_memory()

    def _own_template(self) -> str | None:
        """Return the chat template that the lists give; PromptError if it cannot be read."""
        path = self.defaults.given.get("chat_template")
        return None if path is None else CHAT_TEMPLATE.convert(path, None, None)


def _files(plan: DraftPlan) -> list[ModelFile]:
    """Return the files that are loaded."""
    return [*plan.models, *([] if plan.heads is None or plan.has_own_heads else [plan.heads])]


def _checked(plan: DraftPlan, notify: Notify) -> DraftPlan:
    """Return the plan, without a draft that nobody asked for if it cannot be used, which is said.

    ModelFileError for another file that cannot be used.
    """
    runtime.start()
    _check([plan.target])
    try:
        _check(_files(plan)[1:])
    except ModelFileError as error:
        if not plan.is_default:
            raise
        notify(f"continuing without the draft: {error}")
        return plan.without_draft
    return plan


def _check(files: Sequence[ModelFile]) -> None:
    """Raise ModelFileError if a file cannot be used. Whether memory suffices shows when it is loaded."""
    for file in files:
        check_gguf(file.path)
        with suppress(MemoryFullError):  # until others have been unloaded
            ensure_tried(file.path, file.options.n_ctx)


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
    """Begin with what the models have left in the store that all share.

    At the end, leave it there again, or free it unless `leaves`.
    """
    target, keys = prefix_key(pair.target), [prefix_key(each) for each in pair.caches]
    stores = {f"{target} {key}": each.store for key, each in zip(keys, pair.caches, strict=True)}

    def take() -> None:
        for key, store in stores.items():
            store.take(key)

    def end() -> None:
        for key, store in stores.items():
            if leaves:
                store.leave(key)
            else:
                store.close()

    pair.call(take)
    try:
        yield
        if leaves:
            for each in pair.caches:
                store_finished(each, pair.call)
    finally:
        pair.call(end)


@contextmanager
def _prefixes(folder: PrefixFolder | None, pair: Pair) -> Iterator[None]:
    """Load stored prefixes on entry, save new ones meanwhile, and all on exit."""
    if folder is None:
        yield
        return
    with folder.keeping(pair.caches, say, pair.call):
        yield
    with SlowProgress("saving prefixes"):
        folder.save(pair.caches, say, pair.call)


def _template(pair: Pair, source: str | None) -> ChatTemplate:
    """Return the chat template; of a model that has none chatml, as in llama-server."""
    try:
        return ChatTemplate.of(pair.target, source)
    except NoTemplateError:
        name = printable(pair.target.path.name)
        say(f"{name} has no chat template, so chats have {FALLBACK}; choose another one with --chat-template")
        return ChatTemplate.of(pair.target, builtin_template(FALLBACK))


def kind_of(path: Path) -> Kind:
    """Return what a file holds."""
    try:
        return file_facts(path).kind
    except OSError:
        return Kind.OTHER


def refusal_of(path: Path) -> str | None:
    """Say why a file cannot be served, as a predicate; None if it generates text, or makes vectors."""
    try:
        return file_facts(path).offer_refusal
    except OSError:
        return "cannot be read"
