"""Give a Llama a prediction head (MTP), trained on a CPU in minutes: a target for `--draft mtp`.

\b
    python scripts/train_mtp_target.py              # the embedded target, into build/models/mtp-target.gguf
    python scripts/widen_gguf.py build/models/mtp-target.gguf --layers 10 --quantize Q4_0

The one idea: the model stays as it is, and one layer more learns what it says next from its hidden rows.
The file is of the architecture step35, which can say exactly what the Llama says and has heads.
It needs the ``train`` extra (torch, tokenizers, gguf). Progress goes to stderr; the file's name and
what share of its draft tokens is accepted go to stdout.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import click
import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from demo_pair import corpus, shallow_draft
from demo_pair.lessons import WindowPlan, windows
from llamaspec import FixedLength, Sampling, demo_target, open_pair
from llamaspec.draft_making.student import Llama
from mtp_target import step35, train, trunk
from mtp_target.torch_head import Head
from plain_llama import PlainLlama
from widening import Source, UnsuitableFileError

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "scripts" / "prompts.yaml"
GREEDY, N_CHECKED = Sampling(temperature=0.0), 4  # draft tokens of a round
N_OWN_ROWS, N_OWN_TOKENS = 64, 512  # texts that the target writes for the head


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", type=Path, default=demo_target())
@click.option("--out", type=Path, default=ROOT / "build" / "models" / "mtp-target.gguf", show_default=True)
@click.option(
    "--work",
    type=Path,
    default=ROOT / "build" / "mtp-target",
    show_default=True,
    help="Keeps what is made on the way; stages whose files exist are skipped.",
)
@click.option("--minutes", type=float, default=15.0, show_default=True, help="Training time; more helps.")
@click.option("--start", type=Path, help="Weights to go on from: the head.pt of an earlier run.")
@click.option("--seed", type=int, default=20261122, show_default=True)
def main(source: Path, out: Path, work: Path, minutes: float, start: Path | None, seed: int) -> None:
    """Train a head for SOURCE, by default the embedded target."""
    try:
        file = Source(source)
        model = trunk.load(file)
    except UnsuitableFileError as error:
        sys.exit(f"train_mtp_target: {error}")
    work.mkdir(parents=True, exist_ok=True)
    head = _head(model, source, work, start, minutes, seed)
    step35.write(out, file, tensors(head))
    print(out)
    print(json.dumps({"accepted": accepted(out)}))


def accepted(path: Path) -> list[float]:
    """The share of the first, second, … draft tokens that greedy texts keep, as llama.cpp computes them."""
    kept = Counter[int]()
    drafted = 0
    with open_pair(path, "mtp") as pair:
        for entry in yaml.safe_load(PROMPTS.read_text()):
            stream = pair.stream(entry["text"], sampling=GREEDY, max_tokens=96, policy=FixedLength(N_CHECKED))
            for round_ in stream.run().rounds:
                if len(round_.draft) == N_CHECKED:
                    drafted += 1
                    kept.update(range(round_.n_accepted))
    return [round(kept[i] / drafted, 3) for i in range(N_CHECKED)]


def log(text: str) -> None:
    """Progress goes to stderr."""
    print(text, file=sys.stderr, flush=True)


def _head(model: Llama, source: Path, work: Path, start: Path | None, minutes: float, seed: int) -> Head:
    torch.manual_seed(seed)
    head, file = Head.over(model), work / "head.pt"
    if file.exists():
        head.load_state_dict(torch.load(file))
        return head
    if start is not None:
        head.load_state_dict(torch.load(start))
    ids = _corpus(source, work, seed)
    own = _own_text(model, ids, work, seed)
    plan = WindowPlan(minutes=minutes, rate=4e-3, batch_tokens=2048, short=256, report_seconds=30)
    chance = np.random.default_rng(seed)

    def batch(done: float) -> torch.Tensor:
        rows = plan.batch_tokens // plan.short
        starts = chance.integers(0, own.shape[1] - plan.short - 1, size=rows // 2)
        picked = [own[chance.integers(len(own)), s : s + plan.short + 1] for s in starts]
        return torch.cat([
            windows(ids, rows - rows // 2, plan.short, chance),
            torch.from_numpy(np.stack(picked)),
        ])  # fmt: skip

    train.run(head, model, plan, batch, log)
    torch.save(head.state_dict(), file)
    return head


def _corpus(source: Path, work: Path, seed: int) -> NDArray[np.int64]:
    """Documents in random order as ids [N], by the model's own vocabulary."""
    file = work / "ids.npy"
    if not file.exists():
        documents, _ = corpus.collect()
        order = np.random.default_rng(seed).permutation(len(documents))
        with PlainLlama(source) as model:
            parts = [[*model.tokenize(documents[i].text.encode()), corpus.EOS_ID] for i in order]
        np.save(file, np.concatenate(parts).astype(np.int64))
    ids: NDArray[np.int64] = np.load(file)
    return ids


def _own_text(model: Llama, ids: NDArray[np.int64], work: Path, seed: int) -> NDArray[np.int64]:
    """Texts that the target wrote, [rows, T] ids."""
    file = work / "own_text.npy"
    if not file.exists():
        log(f"the target writes {N_OWN_ROWS} texts")
        chance = np.random.default_rng(seed + 1)
        prompts = windows(ids, N_OWN_ROWS, shallow_draft.N_PROMPT - 1, chance)
        np.save(file, shallow_draft.write_text(model, prompts, N_OWN_TOKENS, seed).numpy())
    rows: NDArray[np.int64] = np.load(file)
    return rows


def tensors(head: Head) -> dict[str, NDArray[np.float32]]:
    """The head's tensors under llama.cpp's names."""

    def array(weight: torch.Tensor) -> NDArray[np.float32]:
        found: NDArray[np.float32] = weight.detach().float().contiguous().numpy()
        return found

    block = head.block
    q, k, v = np.split(array(block.qkv.weight), 3)
    gate, up = np.split(array(block.gate_up.weight), 2)
    named = {
        "nextn.enorm": array(head.embedding_norm.weight),
        "nextn.hnorm": array(head.hidden_norm.weight),
        "nextn.eh_proj": array(head.join.weight),
        "attn_norm": array(block.attention_norm.weight),
        "attn_q": q,
        "attn_k": k,
        "attn_v": v,
        "attn_output": array(block.attention_out.weight),
        "ffn_norm": array(block.ffn_norm.weight),
        "ffn_gate": gate,
        "ffn_up": up,
        "ffn_down": array(block.down.weight),
    }
    return {f"{name}.weight": weight for name, weight in named.items()}


if __name__ == "__main__":
    main()
