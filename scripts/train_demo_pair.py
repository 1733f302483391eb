"""Train the demonstration pair that ships with llamaspec, on a CPU, from text that ships with Python.

    python scripts/train_demo_pair.py               # every stage that is not in --work yet, under an hour
    python scripts/train_demo_pair.py --evaluate    # only measure the two files
    python scripts/train_demo_pair.py --label       # only write their chat template anew

The one idea: each stage leaves a file in ``--work`` and is skipped when that file exists; delete a
file to run its stage again. Progress goes to stderr, the table to stdout, one line of JSON last.
It needs the ``train`` extra (torch, tokenizers, gguf). Guarantee: the files hold what was trained;
`demo_pair.check` compares tokens and logits with llama.cpp before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demo_pair import check, corpus, evaluate, labelled_files, shallow_draft
from demo_pair.chat_template import relabel
from demo_pair.labelled_files import Label
from demo_pair.lessons import WindowPlan, mean_loss, next_token_loss, windows
from llamaspec.draft_making.student import Llama, Shape
from llamaspec.draft_making.training import Progress, train

ROOT = Path(__file__).resolve().parent.parent
TARGET = Shape(n_layers=8)
DRAFT_LAYERS = (0, 4, 7)  # of the target; first and last matter most
N_OWN_ROWS = 128  # rows of N_CONTEXT tokens that the target writes for the draft
MOST_BYTES = 16_000_000  # both files together


@dataclass(frozen=True)
class Options:
    """The command line, parsed."""

    work: Path
    out: Path
    minutes_target: float
    minutes_draft: float
    seed: int
    evaluate: bool
    label: bool
    unfinished: bool
    start: Path | None

    @property
    def files(self) -> tuple[Path, Path]:
        """Where target and draft are written."""
        return self.out / "target.gguf", self.out / "draft.gguf"


def log(text: str) -> None:
    """Progress goes to stderr; stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def train_target(options: Options, data: corpus.Corpus) -> Llama:
    """Return the target, from its file if that exists."""
    torch.manual_seed(options.seed)
    model = Llama(TARGET)
    file, unfinished = options.work / "target.pt", options.work / "target-unfinished.pt"
    if file.exists() or options.unfinished:
        model.load_state_dict(torch.load(unfinished if options.unfinished else file))
        return model
    if options.start is not None:
        model.load_state_dict(torch.load(options.start))
    kept_out = np.concatenate([np.asarray(corpus.encode(data.tokenizer, d)) for d in data.kept_out])
    chance = np.random.default_rng(options.seed)
    plan = WindowPlan(minutes=options.minutes_target, rate=5e-3, long_from=0.7)

    def batch(done: float) -> Tensor:
        length = plan.length(done)
        return windows(data.train_ids, plan.batch_tokens // length, length, chance)

    def report(progress: Progress) -> None:
        loss = mean_loss(model, kept_out, plan.length(progress.done))
        log(f"target {progress}  kept-out {loss:.4f}")
        torch.save(model.state_dict(), unfinished)

    train(
        model,
        plan,
        batch,
        next_token_loss(model, torch.compile(model.hidden, dynamic=False)),
        report,
    )
    log(f"target kept-out loss {mean_loss(model, kept_out, plan.long):.4f}")
    torch.save(model.state_dict(), file)
    return model


def own_text(options: Options, data: corpus.Corpus, target: Llama) -> NDArray[np.int64]:
    """Return text that the target wrote, [rows, N_CONTEXT + 1] ids, from its file if that exists."""
    file = options.work / "own_text.npy"
    if not file.exists():
        log(f"the target writes {N_OWN_ROWS * TARGET.n_context} tokens")
        chance = np.random.default_rng(options.seed + 1)
        prompts = windows(data.train_ids, N_OWN_ROWS, shallow_draft.N_PROMPT - 1, chance)
        written = shallow_draft.write_text(target, prompts, TARGET.n_context, options.seed)
        np.save(file, written.numpy())
    rows: NDArray[np.int64] = np.load(file)
    return rows


def train_draft(options: Options, data: corpus.Corpus, target: Llama) -> Llama:
    """Return the draft, from its file if that exists."""
    torch.manual_seed(options.seed)
    draft = shallow_draft.shallow_copy_of(target, DRAFT_LAYERS)
    file, unfinished = options.work / "draft.pt", options.work / "draft-unfinished.pt"
    if options.unfinished:
        return draft
    if file.exists():
        draft.load_state_dict(torch.load(file))
        return draft
    plan = WindowPlan(minutes=options.minutes_draft, rate=4e-3, long_from=0.0)

    def report(progress: Progress) -> None:
        log(f"draft {progress}")
        torch.save(draft.state_dict(), unfinished)

    batches = shallow_draft.batches(
        data.train_ids,
        own_text(options, data, target),
        plan,
        np.random.default_rng(options.seed + 2),
    )
    train(draft, plan, batches, shallow_draft.teacher_loss(draft, target), report)
    torch.save(draft.state_dict(), file)
    return draft


def write_files(options: Options, data: corpus.Corpus, target: Llama, draft: Llama) -> None:
    """Write both models and check each against llama.cpp."""
    about = "Learned from Python's standard library (PSF-2.0), docstrings of numpy and torch (BSD-3-Clause)."
    labels = (
        Label("llamaspec demo target", f"Target of llamaspec's demonstration pair. {about}"),
        Label("llamaspec demo draft", f"Draft distilled from llamaspec's demo target. {about}"),
    )
    texts = [*check.AWKWARD, *(document.text for document in data.kept_out)]
    ids = corpus.encode(data.tokenizer, data.kept_out[0])[: evaluate.N_CONTEXT]
    total = 0
    for file, label, model in zip(options.files, labels, (target, draft), strict=True):
        total += labelled_files.write(file, model, data.tokenizer, label)
        loaded = evaluate.load(file)
        if different := check.different_tokens(loaded, data.tokenizer, texts):
            raise SystemExit(f"llama.cpp splits these texts differently: {[t[:60] for t in different]}")
        log(f"{file.name}: {file.stat().st_size} bytes; {check.logit_gap(loaded, model, ids)}")
    if total > MOST_BYTES:
        raise SystemExit(f"the two files have {total} bytes, allowed are {MOST_BYTES}")


def print_measurements(options: Options) -> None:
    """Print a table with one row per kept-out module, a sample of text each, and one line of JSON."""
    target, draft = (evaluate.load(file) for file in options.files)
    _, kept_out = corpus.collect()
    chance = np.random.default_rng(options.seed)
    rows = [evaluate.measure(target, draft, d.name, d.text, chance) for d in kept_out]
    for row in rows:
        print(f"--- {row.name}, continued at temperature {evaluate.TEMPERATURE}\n{row.sample}\n")
    print(evaluate.HEADER, *(row.row() for row in rows), sep="\n")
    summary = {
        "greedy_agreement": round(float(np.mean([row.greedy for row in rows])), 4),
        "overlap_at_0.8": round(float(np.mean([row.overlap for row in rows])), 4),
        "bytes": [file.stat().st_size for file in options.files],
        "repeated_at_0.8": round(float(np.mean([row.repeated for row in rows])), 4),
        "repeated_by_people": round(float(np.mean([row.repeated_by_people for row in rows])), 4),
        "modules": {row.name: [round(row.greedy, 4), round(row.overlap, 4)] for row in rows},
    }
    print(json.dumps(summary))


def parse(arguments: list[str]) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", type=Path, default=ROOT / "build" / "demo-pair", help="where the stages leave their files")
    add("--out", type=Path, default=ROOT / "llamaspec" / "demo", help="where the two GGUF files go")
    add("--minutes-target", type=float, default=20.0, help="training time; more helps")
    add("--minutes-draft", type=float, default=15.0, help="distillation time")
    add("--seed", type=int, default=20261120)
    add("--evaluate", action="store_true", help="only measure the files in --out")
    add("--label", action="store_true", help="only write the chat template into the files in --out")
    add("--start", type=Path, help="weights to start the target from: an earlier target.pt")
    add("--unfinished", action="store_true", help="write what the target is so far, with an untrained draft")
    return Options(**vars(parser.parse_args(arguments)))


def main() -> None:
    """Run the stages that are left."""
    options = parse(sys.argv[1:])
    if options.label:
        for file in options.files:
            relabel(file)
        return
    if not options.evaluate:
        options.work.mkdir(parents=True, exist_ok=True)
        data = corpus.build(options.work, options.seed)
        target = train_target(options, data)
        write_files(options, data, target, train_draft(options, data, target))
    print_measurements(options)


if __name__ == "__main__":
    main()
