"""`llamaspec serve`: run the HTTP server; `llamaspec worker`: compute layers for another machine."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from llamaspec.cli import options as shared
from llamaspec.cli.habits import borrowed_settings
from llamaspec.cli.model_options import ModelChoices, device_names, served_model_options
from llamaspec.cli.option_groups import Decorator, GroupedCommand, Integer, Number, refusing_values, section
from llamaspec.cli.output import say
from llamaspec.errors import LlamaspecError, WorkerError
from llamaspec.files import cache_folder
from llamaspec.llama.devices import PORT, find_devices, serve_worker
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.measure.findings import llama_cpp_misfit
from llamaspec.opening import Drafting
from llamaspec.serve import MAX_PARALLEL, ServeSettings
from llamaspec.serve.durations import seconds_of

if TYPE_CHECKING:
    from llamaspec.serve.embedding_service import EmbeddingService
    from llamaspec.serve.models import Models

_HELP = ("-h", "--help", "--help-all")
KEEP_SECONDS = 600.0  # for which models stay loaded by default


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A duration such as 10m, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert an argument."""
        try:
            return seconds_of(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


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
    click.option("--shared-key", metavar="KEY", envvar="LLAMASPEC_SHARED_KEY",
                 help="One more API key: all keys reuse prefixes that were sent with it, such as a system "
                      "prompt. Otherwise each key reuses only its own."),
    click.option("--no-auth", is_flag=True, help="Allow other machines without a key."),
    click.option("--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN",
                 help="Allow web pages from this origin (* = any); may be repeated."),
    click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
                 help="Answer requests for this host name, such as a proxy's; may be repeated. Not needed "
                      "with an API key."),
    click.option("--models-dir", metavar="DIR", envvar="LLAMASPEC_MODELS_DIR",
                 help="Also serve all GGUF files in this folder."),
    click.option("--models-max", "max_models", type=Integer(min=1), metavar="N",
                 help="Maximum number of loaded models; default: as many as memory allows."),
    click.option("--memory-limit", type=Number(min=0.0), metavar="GIB",
                 help="Memory for loaded models, with their KV caches; default: four fifths of the memory of "
                      "the machine, or of its GPUs, without that of --cache-ram."),
    click.option("--keep-alive", type=Duration(), metavar="DURATION",
                 help="How long a model that nobody uses stays loaded, such as 10m; -1 = until its memory is "
                      "needed. Default: 10m; a single --target stays."),
    click.option("--pull", "may_pull", is_flag=True,
                 help="Let clients download models, from the lists and from the hub, by Ollama's /api/pull."),
    click.option("--alias", help="Model name in responses, for a single --target; default: the file's name."),
    shared.CHAT_TEMPLATE_OPTION,
    click.option("--cache-ram", "cache_ram_mib", type=Integer(min=0), metavar="MIB",
                 help="Main memory for finished sequences, so that their prefixes are not processed again. "
                      "Default: a quarter of the free memory, at most 8192; 0 = none."),
    click.option("--cache-dir", metavar="DIR",
                 help="Save finished sequences here every 45 seconds and at the end; load them at the "
                      "start."),
    click.option("--cache-dir-gib", type=Number(min=0.0), default=8.0, show_default=True,
                 help="Maximum cache size on disk."),
    click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
                 help="Format of the log on stderr, one line per request."),
)  # fmt: skip


class _ServeCommand(GroupedCommand):
    """A command that reads variables of llama-server and Ollama, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as usual; the variables hold where neither options nor our own variables do."""
        if not ctx.resilient_parsing and not set(args) & set(_HELP):
            ctx.default_map = borrowed_settings(os.environ)
        return super().parse_args(ctx, args)


@click.command(
    cls=_ServeCommand,
    epilog="""\b
Examples:
  llamaspec serve                                       all models at hand, loaded when they are used
  llamaspec serve --models-dir ~/models --keep-alive 1h
  llamaspec serve --target big-instruct.gguf --draft small-instruct.gguf
  llamaspec serve --pair qwen3-14b --parallel 8 --ctx-per-request 8192
  LLAMASPEC_API_KEY=... llamaspec serve --host 0.0.0.0 --pair qwen3-14b
""",
)
@section("Server", _OPTIONS)
@served_model_options
@shared.drafting_options
def serve(
    models: ModelChoices,
    drafting: Drafting,
    api_keys: tuple[str, ...],
    api_key_file: str | None,
    shared_key: str | None,
    ctx_per_request: int | None,
    chat_template: str | None,
    models_dir: str | None,
    may_pull: bool,
    memory_limit: float | None,
    keep_alive: float | None,
    cache_ram_mib: int | None,
    cache_dir: str | None,
    cache_dir_gib: float,
    request_timeout: float,
    **others: Any,
) -> None:
    """Serve OpenAI-, Anthropic- and Ollama-compatible APIs. Stop with Ctrl-C.

    Without a target, all models at hand are served: those of `llamaspec models list` that are on this
    machine, and those in --models-dir. Each is loaded when a request names it.
    """
    source_of = click.get_current_context().get_parameter_source
    for name, option, better in (
        ("api_keys", "--api-key", "--api-key-file"),
        ("shared_key", "--shared-key", "LLAMASPEC_SHARED_KEY"),
    ):
        if source_of(name) is ParameterSource.COMMANDLINE:
            say(f"warning: other users of this machine can see the key of {option}; use {better}")
    idle_seconds = KEEP_SECONDS if keep_alive is None else keep_alive
    with refusing_values():
        keys = (*api_keys, *_keys_of(api_key_file), *([] if shared_key is None else [shared_key]))
        settings = ServeSettings(
            keys=tuple(dict.fromkeys(keys)),
            shared_key=shared_key,
            request_timeout=request_timeout or None,
            idle_seconds=idle_seconds if isfinite(idle_seconds) else None,
            memory_bytes=None if memory_limit is None else int(memory_limit * 2**30),
            **others,
        )
    check_installed()
    from llamaspec.cli.offered_models import served_models
    from llamaspec.cli.pulling import pull
    from llamaspec.cli.served_models import Serving
    from llamaspec.serve.app import Server, make_app, open_socket, url_of  # an extra
    from llamaspec.serve.connections import raise_file_limit

    settings = replace(settings, max_connections=min(settings.max_connections, raise_file_limit() // 2))
    serving = Serving(
        drafting,
        settings.parallel,
        ctx_per_request,
        chat_template,
        store=None if cache_ram_mib is None else PrefixStore(cache_ram_mib << 20),
        cache_folder=None if cache_dir is None else Path(cache_dir),
        cache_folder_bytes=int(cache_dir_gib * 2**30),
        stays=keep_alive is None,
    )
    tell = say if settings.log_format == "text" else partial(click.echo, err=True)
    with suppress(OSError, ValueError, AttributeError):  # stderr may be closed
        faulthandler.enable(all_threads=False)  # a model file that was shortened, or a fault in llama.cpp
    folder = None if models_dir is None else Path(models_dir)
    with refusing_values():
        served = served_models(models, folder, serving, settings, tell, pull=pull if may_pull else None)
    # A single model warns when it is loaded.
    if not served.any_name and (misfit := llama_cpp_misfit(models.first.target_options)) is not None:
        say(f"warning: {misfit}")
    with open_socket(settings) as opened, closing(served):
        url = url_of(opened)
        lines = _about_one(served, url) if served.any_name else _about_all(served, url)

        def ready() -> None:
            for line in lines:
                say(line)

        server = Server(make_app(served), served, ready)
        with server.capture_signals():  # until prefixes are saved
            server.run(sockets=[opened])
            served.close()
    say("stopped")


def _about_one(served: Models, url: str) -> Sequence[str]:
    """Load the only model, and describe it and the addresses for clients."""
    from llamaspec.serve.embedding_service import EmbeddingService  # an extra

    service = served.open_now()
    if isinstance(service, EmbeddingService):
        return _about_embedder(service, url)
    pair, parallel = service.pair, served.settings.parallel
    draft = None if pair.draft is None else pair.draft.description
    if pair.heads is not None:
        own = pair.heads.path == pair.target.path
        draft = "its own prediction heads" if own else pair.heads.path.name
    what = f"{pair.target.description}, {'no draft' if draft is None else f'draft: {draft}'}"
    return (
        f"{service.model_name} is served at {url}",
        f"{what}; {pair.target.weights.kernels}",
        f"{parallel} requests at once, up to {pair.target.context_size} tokens each",
        _addresses(url),
        *([f"so far, {service.verdict}"] if service.verdict is not None else []),
    )


def _about_embedder(service: EmbeddingService, url: str) -> Sequence[str]:
    """Describe the only model, which generates no text."""
    model = service.target
    what = "scores of documents (/v1/rerank)" if model.ranks else f"vectors of {model.size} numbers"
    return (
        f"{service.model_name} is served at {url}",
        f"{model.description}; {model.weights.kernels}",
        f"{what}, of texts up to {model.context_size} tokens",
        _addresses(url),
    )


def _about_all(served: Models, url: str) -> Sequence[str]:
    """Describe models that are loaded when they are used, and the addresses for clients."""
    names, limit = [model.name for model in served.all], served.settings.memory_bytes
    memory = "" if limit is None else f", as many as fit into {limit / 2**30:.1f} GiB"
    return (
        f"{len(names)} model{'s are' if len(names) > 1 else ' is'} served at {url}",
        ", ".join(names),
        f"each is loaded when a request names it{memory}; {served.settings.parallel} requests at once",
        _addresses(url),
    )


def _addresses(url: str) -> str:
    return f"OpenAI clients: {url}/v1; Anthropic and Ollama clients, and the chat page: {url}"


def _keys_of(name: str | None) -> Sequence[str]:
    """Read API keys from a file; PromptError if it cannot be read or has none."""
    if name is None:
        return ()
    text = shared.decoded(shared.read_input(Path(name), "key file"), f"the key file {name}")
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
@click.option("--threads", type=Integer(1, 512), help="CPU threads; default: the full-speed cores.")
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
