"""`llamaspec serve`: run the HTTP server; `llamaspec worker`: compute layers for another machine."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from llamaspec.chat.template import ChatTemplate, NoTemplateError
from llamaspec.cli import options as shared
from llamaspec.cli.grouped import Decorator, GroupedCommand, Integer, Number, refusing_values, section
from llamaspec.cli.model_options import (
    ModelChoice,
    device_names,
    find_plan,
    model_or_plain_options,
    reporting,
)
from llamaspec.cli.output import SlowProgress, say
from llamaspec.engine.scheduler import MARGIN
from llamaspec.errors import ConstraintError, LlamaspecError, WorkerError
from llamaspec.files import cache_folder
from llamaspec.llama.devices import PORT, find_devices, serve_worker
from llamaspec.llama.options import DEFAULT_CONTEXT
from llamaspec.llama.prefix_folder import PrefixFolder
from llamaspec.opening import Drafting
from llamaspec.pair import Pair
from llamaspec.plan import DraftPlan, ModelFile
from llamaspec.serve import MAX_PARALLEL, ServeSettings

_OPTIONS: tuple[Decorator, ...] = (
    click.option("--host", default="127.0.0.1", show_default=True,
                 help="Address to listen on; an address that other machines can reach needs an API key."),
    click.option("--port", type=Integer(0, 65535), default=8080, show_default=True,
                 help="Port to listen on; 0 = any free port."),
    click.option("--parallel", type=Integer(1, MAX_PARALLEL), default=4, show_default=True,
                 help="Maximum number of requests that generate at once; others wait."),
    click.option("--ctx-per-request", type=Integer(min=2),
                 help="Maximum tokens per request. --n-ctx then sets the KV cache that all requests share; "
                      "default: enough for --parallel requests."),
    click.option("--max-queue", type=Integer(min=0), default=64, show_default=True,
                 help="Maximum number of waiting requests; others are refused."),
    click.option("--request-timeout", type=Number(min=0.0), default=600.0, show_default=True,
                 help="Time limit of a request in seconds; 0 = none."),
    click.option("--grace", "grace_seconds", type=Number(min=0.0), default=30.0, show_default=True,
                 help="Seconds that running requests have to finish when the server stops."),
    click.option("--api-key", "api_keys", multiple=True, metavar="KEY", envvar="LLAMASPEC_API_KEY",
                 help="Require this key; may be repeated. Prefer LLAMASPEC_API_KEY or a file, because other "
                      "users of the machine can see the command line."),
    click.option("--api-key-file", metavar="FILE", help="File with API keys, one per line."),
    click.option("--no-auth", is_flag=True, help="Allow other machines without a key."),
    click.option("--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN",
                 help="Allow web pages from this origin (* = any); may be repeated."),
    click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
                 help="Answer requests for this host name, such as a proxy's; may be repeated. Not needed "
                      "with an API key."),
    click.option("--alias", help="Model name in responses; default: the file's name."),
    shared.CHAT_TEMPLATE_OPTION,
    click.option("--cache-ram", "cache_ram_mib", type=Integer(min=0), metavar="MIB",
                 help="Main memory for finished sequences, so that their prefixes are not processed again. "
                      "Default: a quarter of the free memory, at most 8192; 0 = none."),
    click.option("--cache-dir", metavar="DIR",
                 help="Save finished sequences here when the server stops; load them when it starts."),
    click.option("--cache-dir-gib", type=Number(min=0.0), default=8.0, show_default=True,
                 help="Maximum cache size on disk."),
    click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
                 help="Format of the log on stderr, one line per request."),
)  # fmt: skip


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec serve --target big-instruct.gguf --draft small-instruct.gguf
  llamaspec serve --pair qwen3-14b --parallel 8 --ctx-per-request 8192
  LLAMASPEC_API_KEY=... llamaspec serve --host 0.0.0.0 --pair qwen3-14b
""",
)
@section("Server", _OPTIONS)
@model_or_plain_options
@shared.drafting_options
def serve(
    models: ModelChoice,
    drafting: Drafting,
    api_keys: tuple[str, ...],
    api_key_file: str | None,
    ctx_per_request: int | None,
    chat_template: str | None,
    cache_ram_mib: int | None,
    cache_dir: str | None,
    cache_dir_gib: float,
    request_timeout: float,
    **others: Any,
) -> None:
    """Serve OpenAI-, Anthropic- and Ollama-compatible APIs. Stop with Ctrl-C."""
    source = click.get_current_context().get_parameter_source("api_keys")
    if source is ParameterSource.COMMANDLINE:
        say("warning: other users of this machine can see the key of --api-key; use --api-key-file")
    with refusing_values():
        keys = (*api_keys, *_keys_of(api_key_file))
        settings = ServeSettings(keys=keys, request_timeout=request_timeout or None, **others)
    check_installed()
    from llamaspec.serve.app import Server, open_socket, serving, url_of  # an extra
    from llamaspec.serve.connections import raise_file_limit

    settings = replace(settings, max_connections=min(settings.max_connections, raise_file_limit() // 2))
    with refusing_values():
        plan = _with_room(find_plan(models), models, ctx_per_request, settings.parallel)
    folder = PrefixFolder(Path(cache_dir), int(cache_dir_gib * 2**30)) if cache_dir is not None else None
    tell = say if settings.log_format == "text" else partial(click.echo, err=True)
    cache_ram = None if cache_ram_mib is None else cache_ram_mib << 20
    with suppress(OSError, ValueError, AttributeError):  # stderr may be closed
        faulthandler.enable(all_threads=False)  # a model file that was shortened, or a fault in llama.cpp
    opened = open_socket(settings)
    with opened, reporting(plan, models, drafting, cache_ram) as pair, _prefixes(folder, pair):
        with SlowProgress("preparing the server"), suppress(ConstraintError):
            pair.json_schema({})  # prepares the vocabulary now, not at the first request with a schema
        template = _template(pair, chat_template)
        with serving(pair, pair.length, template, settings, tell) as (app, service):
            url = url_of(opened)
            lines = [f"{service.model_name} is served at {url}", *_in_short(pair, settings.parallel, url)]
            if service.verdict is not None:
                lines.append(f"so far, {service.verdict}")

            def ready() -> None:
                for line in lines:
                    say(line)

            Server(app, service, ready).run(sockets=[opened])
    say("stopped")


def _in_short(pair: Pair, parallel: int, url: str) -> Sequence[str]:
    """Describe the models and the addresses for clients."""
    draft = None if pair.draft is None else pair.draft.description
    if pair.heads is not None:
        draft = "its own prediction heads"
    what = f"{pair.target.description}, {'no draft' if draft is None else f'draft: {draft}'}"
    return (
        f"{what}; {pair.target.weights.kernels}",
        f"{parallel} requests at once, up to {pair.target.context_size} tokens each",
        f"OpenAI clients: {url}/v1; Anthropic and Ollama clients, and the chat page: {url}",
    )


def _keys_of(name: str | None) -> Sequence[str]:
    """Read API keys from a file; PromptError if it cannot be read or has none."""
    if name is None:
        return ()
    text = shared.decoded(shared.read_input(Path(name), "key file"), f"the key file {name}")
    text = text.removeprefix("\ufeff")  # editors on Windows begin a file with it
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise LlamaspecError(f"the key file {name} has no key; write one key per line")
    return keys


def check_installed() -> None:
    """Raise a LlamaspecError if the extra `serve` is not installed."""
    if any(find_spec(name) is None for name in ("starlette", "uvicorn", "prometheus_client")):
        raise LlamaspecError(
            "the server needs starlette, uvicorn and prometheus_client; install them with: "
            'pip install "llamaspec[serve]"'
        )


def _with_room(plan: DraftPlan, models: ModelChoice, per_request: int | None, parallel: int) -> DraftPlan:
    """Return the plan with one KV cache that all requests share."""
    n_ctx = models.target_options.n_ctx
    per_request = per_request or n_ctx
    n_cells = n_ctx or ((per_request or DEFAULT_CONTEXT) + MARGIN) * parallel
    if per_request is not None and per_request > n_cells:
        raise ValueError(
            f"--ctx-per-request {per_request} is more than --n-ctx {n_cells}, which all requests share"
        )

    def roomy(file: ModelFile, n_ctx: int | None) -> ModelFile:
        return replace(file, options=replace(file.options, n_ctx=n_ctx, n_cells=n_cells))

    draft = plan.draft and roomy(plan.draft, models.draft_options.n_ctx or per_request)
    return replace(plan, target=roomy(plan.target, per_request), draft=draft)


@contextmanager
def _prefixes(folder: PrefixFolder | None, pair: Pair) -> Iterator[None]:
    """Load stored prefixes on entry, and save them on exit."""
    models = [model for model in (pair.target, pair.draft) if model is not None]
    if folder is not None:
        pair.call(lambda: folder.load(models, say))
    yield
    if folder is not None:
        pair.call(lambda: folder.save(models, say))


def _template(pair: Pair, source: str | None) -> ChatTemplate | None:
    try:
        return ChatTemplate.of(pair.target, source)
    except NoTemplateError:
        say("the target has no chat template; only /v1/completions works (--chat-template)")
        return None


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec worker --host 10.0.0.7                       on the other machine
  llamaspec generate --target big.gguf --draft small.gguf --rpc 10.0.0.7:50052 "Once"
""",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=Integer(1, 65535), default=PORT, show_default=True, help="Port to listen on.")
@click.option("--threads", type=Integer(1, 512), help="CPU threads; default: the physical cores.")
@click.option(
    "--device",
    metavar="NAME,...",
    help="Devices to compute on, separated by commas; default: all GPUs, else the CPU.",
)
@click.option("--cache", is_flag=True,
              help="Keep weights in the cache folder, so that a client sends them only once.")  # fmt: skip
def worker(host: str, port: int, threads: int | None, device: str | None, *, cache: bool) -> None:
    """Compute layers of a target for llamaspec on another machine.

    The other machine connects with --rpc HOST:PORT, one client at a time. There is no password and no
    encryption: anyone who can reach the port can use this machine and read what it computes. Listen on
    private networks only.
    """
    found = find_devices()
    names = device_names(device)
    if names is None:
        names = tuple(each.name for each in found if each.is_gpu) or ("CPU",)
    unknown = [name for name in names if name not in {each.name for each in found}]
    if unknown or not names:
        known = ", ".join(each.name for each in found)
        fault = f"there is no device {unknown[0]!r}" if unknown else "a worker needs a device"
        raise click.UsageError(f"{fault}; choose from {known}")
    folder = None
    if cache:
        folder = cache_folder() / "worker"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            fault = f"cannot make {folder}: {error.strerror}"
            raise WorkerError(f"{fault}; set LLAMASPEC_CACHE to another folder") from error
    ready = (
        f"a worker listens on {host}:{port} and computes on {', '.join(names)}; anyone who can reach it can "
        f"use it, so use private networks only; Ctrl-C stops it"
    )
    serve_worker(host, port, threads, names, folder, lambda: say(ready))
