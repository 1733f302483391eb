"""Contexts of a few tokens, and metadata of many: once cut without a word, or the end of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from forward_requests import EXACT, MEMORIES, TOLERANCE, assert_same, fresh, request, text
from llamaspec import FixedLength, LlamaModel, ModelOptions, PromptError, Sampling, StopReason, open_pair
from llamaspec.errors import ContextFullError
from model_store import ModelStore, OpenModel
from patience import PATIENCE


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_context_of_ten_tokens(store: ModelStore, kind: str) -> None:
    """It became 256, silently: llama.cpp rounds the number of cells."""
    options = ModelOptions(n_ctx=10, threads=1)
    with open_pair(store.path(kind), store.path(kind), target_options=options, draft_options=options) as pair:
        assert pair.target.context_size == 10
        for n_draft in (0, 3):
            completion = pair.stream(
                text(4), seed=1, max_tokens=100, sampling=Sampling(temperature=0), policy=FixedLength(n_draft)
            ).run()
            assert completion.stop_reason is StopReason.CONTEXT
            assert len(completion.tokens) == 6
        with pytest.raises(PromptError, match="10 tokens, which leaves no room in a context of 10"):
            pair.stream(text(10))


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_small_context_refuses_what_is_longer(opened: OpenModel, kind: str) -> None:
    model, other = opened(kind, n_ctx=10, **EXACT), opened(kind, **EXACT)
    for wanted in (request(10, n_logits=4), request(9), request(3, 1, draft=text(7))):
        assert_same(model.forward(wanted), fresh(other, wanted), TOLERANCE[kind])
    for wanted in (request(11), request(8, draft=text(3))):
        with pytest.raises((ValueError, ContextFullError), match="10"):
            model.forward(wanted)


SMALLEST = """
import sys
from pathlib import Path
import numpy as np
from llamaspec import FixedLength, ModelOptions, open_pair
path = Path(sys.argv[1])
for n_target, n_draft in [*((n, 64) for n in range(2, 10)), *((64, n) for n in range(2, 10))]:
    with open_pair(path, path, target_options=ModelOptions(n_ctx=n_target, threads=1),
                   draft_options=ModelOptions(n_ctx=n_draft, threads=1, max_scored=16)) as pair:
        assert (pair.target.context_size, pair.draft.context_size) == (n_target, n_draft)
        texts = []
        for prompt in ([5], [5, 6, 7, 8]):
            if len(prompt) < n_target:
                stream = pair.stream(np.array(prompt, dtype=np.int32), seed=1, max_tokens=40,
                                     policy=FixedLength(4))
                texts.append(len(stream.run().tokens))
        print(n_target, n_draft, texts)
"""


@pytest.mark.parametrize("kind", ["lfm2", "jamba", "llama"])
def test_the_smallest_contexts_of_target_and_draft(store: ModelStore, kind: str) -> None:
    """2 to 9 tokens ended the process with LFM2: in a process of its own, where that can be seen."""
    done = subprocess.run(
        [sys.executable, "-c", SMALLEST, str(store.path(kind))],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        *(f"{n} 64 {[n - 1] if n < 5 else [n - 1, n - 4]}" for n in range(2, 10)),
        *(f"64 {n} [40, 40]" for n in range(2, 10)),
    ]


def with_template(source: Path, path: Path, template: str) -> Path:
    """A copy of a model with a chat template."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith(("GGUF.", "general.architecture")):
            continue
        kind = field.types[0]
        sub_kind = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_kind)
    writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("size", [4095, 4096, 4097, 65_535, 65_536, 200_000])
def test_long_metadata_is_whole(store: ModelStore, tmp_path: Path, size: int) -> None:
    """A chat template above 64 KiB lost its end."""
    template = "é" + "x" * (size - 5) + "end"
    assert len(template.encode()) == size
    path = with_template(store.path(), tmp_path / "model.gguf", template)
    with LlamaModel(path, ModelOptions(threads=1)) as model:
        assert model.metadata("tokenizer.chat_template") == template
        assert model.metadata("general.name") == "tiny llama"
