"""Two clients at once behind one system prompt: `llamaspec serve` and llama.cpp's `llama-server`, in turns.

\b
    python scripts/bench_clients.py --target big.gguf --draft small.gguf --llama-server llama/bin/llama-server

Each client has a conversation of four turns. Both begin with the same system prompt of about 1,800 tokens, as
two users of one program do. A conversation goes on from the server's own answers, all of which have
`--max-tokens`. What is timed is the whole: from the first request to the end of the last answer. Servers take
turns; each repeat has another system prompt, so that none finds it in its cache. Ratios are to llama-server
without a draft, in the same repeat. A table goes to stderr; with --json one line of JSON goes to stdout.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from llamaspec.cli.output import print_table, stderr_console
from llamaspec.errors import LlamaspecError
from llamaspec.llama.options import ModelOptions
from llamaspec.measure.bench import Message, read_task_file
from llamaspec.measure.served_arms import AUTO, PEER_PLAIN, Ask, own_arms, peer_arms, serving
from llamaspec.plan import DraftPlan, ModelFile

SYSTEM = "[{}] You help with this small project. Answer briefly. Its files:"
QUESTIONS = (
    ("What is `Shelf.available` for?", "When does `lend` raise an error?",
     "Which method needs the date of today, and why?", "Name one thing that you would test first."),
    ("What does `formatMinute` return for 125?", "How does `next` choose departures?",
     "What happens if `delay` names a time at which nothing departs?", "Which method would you simplify?"),
)  # fmt: skip
FILES = ("shelf.py", "timetable.js", "tools.json")  # of the tasks of bench: about 1,800 tokens
CONTEXT = 4096  # tokens of each conversation
FILE, COUNT = click.Path(exists=True, dir_okay=False, path_type=Path), click.IntRange(min=1)


@dataclass(frozen=True, slots=True)
class Run:
    """What one server made of both conversations."""

    arm: str
    seconds: float  # from the first request to the end of the last answer
    first_seconds: float  # median over the requests, to the first text
    n_tokens: int


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=FILE, required=True)
@click.option("--draft", type=FILE, help="Of llamaspec, and of llama-server's draft-simple.")
@click.option("--llama-server", metavar="PROGRAM", required=True)
@click.option("--spec-type", "spec_types", multiple=True, metavar="TYPE",
              help="Also llama-server with this type of drafts; may be repeated.")  # fmt: skip
@click.option("--max-tokens", "-n", type=click.IntRange(1, 400), default=64, show_default=True,
              help="Of every answer.")  # fmt: skip
@click.option("--repeats", "-r", type=COUNT, default=3, show_default=True)
@click.option("--threads", type=COUNT, help="Of every server; default: what each chooses.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
def main(
    target: Path,
    draft: Path | None,
    llama_server: str,
    spec_types: Sequence[str],
    max_tokens: int,
    repeats: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure two clients at once, and print how the servers compare."""
    n_parallel = len(QUESTIONS)
    options = ModelOptions(n_ctx=n_parallel * CONTEXT, threads=threads)
    given = ["--target", str(target), "--n-ctx", str(options.n_ctx), "--ctx-per-request", str(CONTEXT)]
    given += [] if draft is None else ["--draft", str(draft)]
    given += [] if threads is None else ["--threads", str(threads)]
    drafts = () if draft is None else (ModelFile(draft, options),)
    arms = [arm for arm in own_arms(given, (), None, n_parallel) if arm.name == AUTO]
    plan = DraftPlan(ModelFile(target, options), drafts)
    arms += peer_arms(llama_server, plan, spec_types or ("none",), n_parallel)
    runs: list[Run] = []
    with serving(arms) as asks:
        names = [*asks]
        for repeat in range(-1, repeats):  # the first of all is not counted
            shift = repeat % len(names)
            for name in names[shift:] + names[:shift]:
                run = converse(name, asks[name], repeat, max_tokens)
                click.echo(f"{repeat + 1}/{repeats} {name}: {run.seconds:.2f} s", err=True)
                runs += [run] if repeat >= 0 else []
    found = compared(runs)
    rows = [(name, *(f"{number:.2f}" for number in each.values())) for name, each in found.items()]
    print_table(("<server", "whole s", "ratio", "first s", "tokens/s"), rows, stderr_console())
    if as_json:
        told = {"target": target.name, "draft": draft and draft.name, "arms": found}
        click.echo(json.dumps({**told, "runs": [asdict(run) for run in runs]}))


def converse(name: str, ask: Ask, number: int, max_tokens: int) -> Run:
    """Let all clients talk with a server at the same time."""
    files = read_task_file().files
    system = "\n\n".join([SYSTEM.format(number), *(f"{file}:\n{files[file]}" for file in FILES)])
    fields = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}

    def talk(questions: Sequence[str]) -> list[tuple[float, int]]:
        """Seconds to the first text and number of tokens of each answer."""
        messages: list[Message] = [{"role": "system", "content": system}]
        seen = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer = ask({**fields, "messages": [*messages]})
            messages.append({"role": "assistant", "content": answer.reply or "…"})
            seen.append((answer.first_seconds, answer.n_tokens))
        return seen

    with ThreadPoolExecutor(len(QUESTIONS)) as clients:
        begin = time.perf_counter()
        seen = [each for talked in clients.map(talk, QUESTIONS) for each in talked]
        seconds = time.perf_counter() - begin
    return Run(name, seconds, statistics.median(first for first, _ in seen), sum(n for _, n in seen))


def compared(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Medians of every server; the ratio is to llama-server without a draft, in the same repeat."""
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run)
    return {
        name: {
            "seconds": statistics.median(run.seconds for run in own),
            "ratio": statistics.median(
                peer.seconds / run.seconds for run, peer in zip(own, by_arm[PEER_PLAIN], strict=True)
            ),
            "first_seconds": statistics.median(run.first_seconds for run in own),
            "tokens_per_second": statistics.median(run.n_tokens / run.seconds for run in own),
        }
        for name, own in by_arm.items()
    }


if __name__ == "__main__":
    try:
        main()
    except LlamaspecError as error:
        sys.exit(f"bench_clients.py: {error}")
