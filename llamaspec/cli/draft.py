"""`llamaspec draft`: make a draft for a target that has none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from llamaspec.cli.model_options import KERNELS_OPTION, fetched_model
from llamaspec.cli.option_groups import Command, Group, option_group, refusing_values
from llamaspec.cli.options import JSON_OPTION, read_input
from llamaspec.cli.output import SlowProgress, say
from llamaspec.draft_making.measuring import Trial, TrialSettings
from llamaspec.errors import LlamaspecError, printable
from llamaspec.llama.gguf_file import check_gguf, file_parts
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import ModelOptions
from llamaspec.plan import made_path
from llamaspec.sampling.filters import Sampling


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Options of `distil` for the target, the texts and the file."""

    models: ModelOptions  # of the target
    sampling: Sampling  # of the texts that the target writes
    texts: tuple[bytes, ...]
    output: Path | None
    replaces: bool  # a file of this name


def _options(
    *, text: Sequence[str], output: str | None, force: bool, temperature: float, **models: Any
) -> DraftOptions:
    how = ModelOptions(**models), Sampling(temperature=temperature)
    file = _file(output, force, text)
    return DraftOptions(*how, _texts(text), file, force)


def _draft_options(texts: str) -> Callable[[Command], Command]:
    return option_group(
        "options",
        _options,
        (
            click.option("--text", "-f", metavar="FILE", multiple=True, help=texts),
            click.option("--output", "-o", metavar="FILE",
                         help="File of the draft; default: a file beside the target."),
            click.option("--force", is_flag=True, help="Replace a file of the same name."),
            click.option("--temperature", "-t", type=float, metavar="NUMBER", default=0.8, show_default=True,
                         help="Temperature of the texts that the target writes."),
            click.option("--n-ctx", "--ctx-size", "-c", type=int,
                         help="Context size in tokens; default: the model's training context, limited by "
                              "memory."),
            click.option("--gpu-layers", "-ngl", type=int, help="Layers on the GPU; default: all that fit."),
            click.option("--threads", type=int, help="Threads; default: the free full-speed cores."),
            KERNELS_OPTION,
        ),
    )  # fmt: skip


@click.group(cls=Group)
def draft() -> None:
    """Make a draft for a target that has none. Afterwards, `--draft auto` finds it."""


@draft.command(
    epilog="""\b
Examples:
  llamaspec draft distil big.gguf --text corpus.txt --minutes 240
  llamaspec draft distil big.gguf -f notes.md -f main.py --layers 2 --output small.gguf
""",
)
@click.argument("target", metavar="TARGET")
@click.option(
    "--minutes", type=float, metavar="NUMBER", default=60.0, show_default=True, help="Training time."
)
@click.option("--layers", type=int, default=4, show_default=True, help="Layers of the draft.")
@click.option("--width", type=int, help="Hidden size of the draft; default: chosen by the target's size.")
@_draft_options("File with a sample of your texts; required, may be repeated. More text is better.")
@JSON_OPTION
def distil(
    target: str, minutes: float, layers: int, width: int | None, options: DraftOptions, as_json: bool
) -> None:
    """Train a small draft to imitate the target on your texts (needs the extra `train`).

    After Ctrl-C, the same command resumes the training. At the end, the draft is measured, and kept
    whatever the result.
    """
    try:
        from llamaspec.draft_making.distil import Distillation, distil_draft
    except ImportError as error:
        raise LlamaspecError(
            f"distilling needs {error.name}, which is not installed; run: pip install 'llamaspec[train]'"
        ) from error
    if not options.texts:
        raise click.UsageError("name the training text with --text", click.get_current_context())
    with refusing_values():
        wish = Distillation(minutes, layers, width)
    path = fetched_model(target)
    check_gguf(path)
    _refuse_input(options.output, file_parts(path))
    output = options.output or _new(made_path(path, "distilled"), options.replaces)
    with SlowProgress("distilling") as progress:
        distil_draft(path, options.models, options.texts, wish, output, say, progress)
    with _opened(path, options) as model, SlowProgress("measuring the draft together with its target"):
        trial = Trial(model, TrialSettings(options.texts, sampling=options.sampling))
        cost, accepted = trial.cost_and_acceptance(output)
        measured = trial.speed_up(output)
    if as_json:
        found = {"cost_ratio": cost, "acceptance": accepted, "measured": asdict(measured)}
        click.echo(json.dumps({"path": str(output), **found}))
        return
    click.echo(f"a draft token takes {cost:.3f} of a target token's time, acceptance {accepted:.2f}")
    gain = f"{measured.median:.2f}x ± {measured.half:.2f}"
    click.echo(f"wrote {printable(str(output))}, measured: {gain}")


def _opened(path: Path, options: DraftOptions) -> LlamaModel:
    check_gguf(path)
    with SlowProgress("loading") as progress:
        return LlamaModel(path, options.models, progress)


def _file(output: str | None, force: bool, texts: Sequence[str]) -> Path | None:
    if output is None:
        return None
    path = Path(output)
    if path.is_dir():
        raise LlamaspecError(f"{path} is a folder; name a file in it with --output")
    _new(path, force)
    _refuse_input(path, map(Path, texts))
    return path


def _new(path: Path, force: bool) -> Path:
    if path.exists() and not force:
        raise LlamaspecError(f"{path} exists; name another file with --output, or --force to replace it")
    return path


def _refuse_input(output: Path | None, inputs: Iterable[Path]) -> None:
    """Raise a LlamaspecError if the command would replace a file that it reads."""
    if output is not None and output.exists():
        for each in inputs:
            if each.exists() and each.samefile(output):
                raise LlamaspecError(f"{output} is an input of this command; name another file with --output")


def _texts(names: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(read_input(Path(name), "text") for name in names)
