"""Train a draft with another vocabulary than the embedded target's, to measure what such a pair is worth.

    python scripts/train_foreign_draft.py build/foreign-4096.gguf                   # BPE learnt on other text
    python scripts/train_foreign_draft.py build/foreign-bytes.gguf --n-vocab 258    # bytes, and two controls

The one idea: the same text, tokenised by somebody else. The vocabulary is learnt on every third document, so
even tokens that both spell alike have other numbers. It learns from the text alone, not from the target,
as a draft of another family would. Progress goes to stderr. It needs the ``train`` extra.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo_pair import corpus, export
from demo_pair.lessons import WindowPlan, next_token_loss, windows
from llamaspec.draft_making.student import Llama, Shape
from llamaspec.draft_making.training import train


@dataclass(frozen=True)
class Options:
    """The command line, parsed."""

    out: Path
    n_vocab: int
    n_layers: int
    minutes: float
    seed: int


def main() -> None:
    """Train and write one file."""
    options = parse(sys.argv[1:])
    torch.manual_seed(options.seed)
    documents, _ = corpus.collect()
    random.Random(options.seed).shuffle(documents)
    tokenizer = corpus.learn_vocabulary([document.text for document in documents[::3]], options.n_vocab)
    ids = np.asarray([token for document in documents for token in corpus.encode(tokenizer, document)])
    model = Llama(Shape(n_layers=options.n_layers, n_vocab=options.n_vocab))
    plan = WindowPlan(minutes=options.minutes, rate=5e-3, long_from=0.7)
    chance = np.random.default_rng(options.seed)

    def batch(done: float) -> Tensor:
        length = plan.length(done)
        return windows(ids, plan.batch_tokens // length, length, chance)

    loss = next_token_loss(model, torch.compile(model.hidden, dynamic=False))
    train(model, plan, batch, loss, lambda progress: print(progress, file=sys.stderr, flush=True))
    about = (
        f"Trained on the text of llamaspec's demo pair; a vocabulary of its own, {options.n_vocab} tokens."
    )
    size = export.write(options.out, model, tokenizer, export.Label("llamaspec foreign draft", about))
    print(f"{options.out}: {size} bytes", file=sys.stderr)


def parse(arguments: list[str]) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--n-vocab", type=int, default=4096, help="tokens; 258 are bytes and two controls")
    parser.add_argument("--n-layers", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10.0, help="training time; more helps")
    parser.add_argument("--seed", type=int, default=7)
    return Options(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
