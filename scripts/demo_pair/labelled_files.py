"""What the files of the demonstration pair say about themselves, and their vocabulary.

The vocabulary is in full in both files, so that target and draft fit each other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer

from demo_pair.chat_template import CHAT_TEMPLATE
from demo_pair.corpus import BOS_ID, EOS_ID, KEPT_OUT
from llamaspec.draft_making.student import Llama, write_model


@dataclass(frozen=True)
class Label:
    """What a file says about itself."""

    name: str
    description: str


def write(path: Path, model: Llama, tokenizer: Tokenizer, label: Label) -> int:
    """Write `model` to `path`; return the size in bytes."""

    def describe(writer: GGUFWriter) -> None:
        _add_label(writer, label)
        _add_vocabulary(writer, tokenizer)

    return write_model(path, model, describe)


def _add_label(writer: GGUFWriter, label: Label) -> None:
    writer.add_name(label.name)
    writer.add_description(label.description)
    writer.add_license("mit")
    writer.add_license_name(
        "weights: MIT; trained on text under PSF-2.0 (Python's standard library) "
        "and BSD-3-Clause (docstrings of numpy and torch)"
    )
    writer.add_tags(["python", "speculative-decoding", "demo", "kept out: " + " ".join(KEPT_OUT)])


def _add_vocabulary(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    state = json.loads(tokenizer.to_str())
    by_id = sorted(state["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in by_id])
    writer.add_token_types(
        [TokenType.CONTROL if i in (BOS_ID, EOS_ID) else TokenType.NORMAL for _, i in by_id]
    )
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
