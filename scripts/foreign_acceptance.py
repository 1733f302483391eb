"""What another vocabulary costs in acceptance: the embedded draft with its own, cut and numbered anew.

    python scripts/foreign_acceptance.py
    python scripts/foreign_acceptance.py --draft other.gguf

Each is tried both ways, by intersection and by alignment (docs/foreign-vocabularies.md), with three draft
tokens in a round; the text is compared with plain decoding.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import click
import gguf
import numpy as np

from help_text import help_text
from llamaspec import FixedLength, ModelOptions, NoDrafter, Sampling, demo_draft, demo_target, open_pair

PROMPTS = (
    "def quicksort(items):\n", "import os\nimport sys\n\n\nclass Reader:\n    ",
    "    def __init__(self, name, value=None):\n        ", "for i in range(10):\n", "The function returns",
    '"""Utilities for reading', "try:\n    import ", "Return the number of",
)  # fmt: skip
VOCABULARY = "tokenizer.ggml."
CHANGED = {VOCABULARY + name for name in ("tokens", "token_type", "merges", "bos_token_id", "eos_token_id")}
CHANGED |= {"general.architecture", "llama.vocab_size"}
WAYS = {"intersection": 0.0, "alignment": 2.0}  # least share of shared tokens for intersection
ONE_THREAD = ModelOptions(threads=1)


def write_cut(path: Path, n_tokens: int) -> None:
    """The embedded draft with its first tokens only, in another order."""
    source = gguf.GGUFReader(demo_draft())
    tokens, types, merges = (
        source.fields[VOCABULARY + name].contents() for name in ("tokens", "token_type", "merges")
    )
    order = np.random.default_rng(0).permutation(n_tokens)
    place, known = np.argsort(order), set(tokens[:n_tokens])
    writer = gguf.GGUFWriter(path, "llama")
    for name, entry in source.fields.items():
        if name not in CHANGED and not name.startswith("GGUF."):
            if entry.types[0] == gguf.GGUFValueType.ARRAY:
                writer.add_array(name, entry.contents())
            else:
                writer.add_key_value(name, entry.contents(), entry.types[0])
    writer.add_token_list([tokens[i] for i in order])
    writer.add_token_types([types[i] for i in order])
    writer.add_token_merges([merge for merge in merges if merge.replace(" ", "") in known])
    writer.add_bos_token_id(int(place[0]))
    writer.add_eos_token_id(int(place[1]))
    for tensor in source.tensors:
        data = (
            tensor.data[:n_tokens][order]
            if tensor.name in ("token_embd.weight", "output.weight")
            else tensor.data
        )
        writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(draft: Path, label: str, temperatures: tuple[float, ...], n: int) -> None:
    """Print the share of draft tokens that is accepted, both ways."""
    for way, mostly in WAYS.items():
        with (
            mock.patch("llamaspec.drafters.foreign.MOSTLY", mostly),
            open_pair(demo_target(), draft, target_options=ONE_THREAD, draft_options=ONE_THREAD) as pair,
        ):
            share = f"{pair.foreign.overlap.of_text:.0%}" if pair.foreign else "same"
            for temperature in temperatures:
                sampling, accepted, verified, same = Sampling(temperature=temperature), 0, 0, True
                for seed, prompt in enumerate(PROMPTS):
                    found, plain = (
                        pair.stream(
                            prompt,
                            sampling=sampling,
                            seed=seed,
                            max_tokens=n,
                            policy=FixedLength(3),
                            drafter=drafter,
                        ).run()
                        for drafter in (None, NoDrafter())
                    )
                    same &= found.tokens == plain.tokens
                    accepted += found.summary.n_accepted
                    verified += found.summary.n_verified
                text = "the same text" if same else "ANOTHER TEXT"
                rate = accepted / max(verified, 1)
                print(f"{label:10} {share:>5} {way:12} t={temperature:<4g} {rate:.3f} {text}", flush=True)


@click.command(help=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--draft", type=Path, help="This one, in place of the embedded draft's vocabularies.")
@click.option(
    "--tokens",
    "-v",
    "sizes",
    type=int,
    multiple=True,
    default=(8192, 6144, 4096, 2048, 1024),
    show_default=True,
)
@click.option(
    "--temperature", "-t", "temperatures", type=float, multiple=True, default=(0.0, 0.8), show_default=True
)
@click.option("--max-tokens", "-n", type=int, default=48, show_default=True)
def main(
    draft: Path | None, sizes: tuple[int, ...], temperatures: tuple[float, ...], max_tokens: int
) -> None:
    """Measure one draft, or cuts of the embedded one."""
    if draft is not None:
        measure(draft, draft.stem[:10], temperatures, max_tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            path = Path(folder) / f"cut-{size}.gguf"
            write_cut(path, size)
            measure(path, str(size), temperatures, max_tokens)


if __name__ == "__main__":
    main()
