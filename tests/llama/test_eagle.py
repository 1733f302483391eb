"""EAGLE-3 over the real llama.cpp: what is its own; what it has in common with heads is in test_heads.py."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from command import invoke, said
from forward_requests import EXACT, Count, text
from head_requests import drafted_side_by_side, opened
from llamaspec import FixedLength, ModelOptions, Sampling, open_pair
from llamaspec.errors import ModelFileError, PairError
from llamaspec.llama import head_files, trial
from llamaspec.llama.weights import Weights
from llamaspec.values import MTP, TARGET, ForwardRequest, Source
from model_store import ModelStore
from tiny_models import Array, Recipe, write_eagle3, write_vocabulary_only

ONE_THREAD = ModelOptions(threads=1, **EXACT)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-bare"])
def test_the_text_is_the_targets_own_among_others(store: ModelStore, kind: str) -> None:
    """With an embedding and an output of its own, of fewer tokens, and with the target's."""
    prompts = [text(n, seed) for n, seed in ((12, 0), (40, 1), (1, 2))]
    with opened((store.path("llama"), store.path(kind))) as pair:
        for temperature in (0.0, 1.0):
            found = drafted_side_by_side(pair, prompts, temperature)
            assert {round_.source for completion in found for round_ in completion.rounds} >= {Source.MTP}


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_tokens_that_it_does_not_have_trouble_no_rule(store: ModelStore, rule: str) -> None:
    with opened((store.path("llama"), store.path("eagle3"))) as pair:
        sampling = Sampling(temperature=1.0, top_k=None)
        found = pair.stream("a b", rule=rule, seed=1, sampling=sampling, max_tokens=30, policy=FixedLength(3))
        assert found.run().summary.n_verified > 20


def test_it_never_drafts_a_token_that_it_does_not_have(store: ModelStore) -> None:
    with opened((store.path("llama"), store.path("eagle3"))) as pair:
        pair.target.forward(ForwardRequest(TARGET, text(20), n_logits=0))
        assert pair.heads is not None
        wanted = ForwardRequest(MTP, text(21))
        pair.heads.prepare([(-1, wanted, 0)])
        (logits,) = pair.heads.evaluate([(-1, wanted)])
    assert np.isneginf(logits[0, :16]).all()
    assert np.isfinite(logits[0, 16:]).all()


def test_it_does_not_read_the_first_token_of_a_text(store: ModelStore, evaluated: Count) -> None:
    """There is no hidden row for it, and none is made up: it was trained without."""
    with opened((store.path("llama"), store.path("eagle3"))) as pair:
        pair.target.forward(ForwardRequest(TARGET, text(20), n_logits=0))
        evaluated.taken()
        assert pair.heads is not None
        wanted = ForwardRequest(MTP, text(21))
        pair.heads.prepare([(-1, wanted, 0)])
        pair.heads.evaluate([(-1, wanted)])
        assert [(segment.start, len(segment.tokens)) for segment in evaluated.segments] == [(0, 20), (1, 20)]


def test_it_computes_what_eagle_3_is(store: ModelStore) -> None:
    """The paper's arithmetic in numpy, for a text of two tokens: the second reads the first one's rows."""
    path, read = store.path("eagle3"), text(2)
    with opened((store.path("llama"), path)) as pair:
        pair.target.forward(ForwardRequest(TARGET, read[:1], n_logits=0))
        cached = pair.target.cached(-1)
        assert cached is not None
        rows = cached.hidden.rows(0, 1).copy()
        assert pair.heads is not None
        pair.heads.prepare([(-1, ForwardRequest(MTP, read), 0)])
        (logits,) = pair.heads.evaluate([(-1, ForwardRequest(MTP, read))])
    width = rows.shape[1] // 3
    np.testing.assert_allclose(rows[0, :width], weights(store.path("llama"))["token_embd.weight"][read[0]])
    assert (rows[0, width : 2 * width] == rows[0, 2 * width :]).all()
    np.testing.assert_allclose(logits[0, 16:], by_hand(weights(path), rows[0], int(read[1])), atol=1e-4)


def weights(path: Path) -> dict[str, Array]:
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}


def by_hand(weight: dict[str, Array], rows: Array, token: int) -> Array:
    """Scores of an EAGLE-3 that sees one position: attention is its value then."""

    def norm(x: Array, name: str) -> Array:
        scaled: Array = x / np.sqrt(np.square(x).mean() + 1e-5) * weight[f"{name}.weight"]
        return scaled

    def layer(x: Array, name: str) -> Array:
        product: Array = weight[f"blk.0.{name}.weight"] @ x
        return product

    g = weight["fc.weight"] @ rows
    both = np.concatenate([
        norm(weight["token_embd.weight"][token], "blk.0.attn_norm"), norm(g, "blk.0.attn_norm_2")
    ])  # fmt: skip
    h = g + layer(layer(both, "attn_v"), "attn_output")
    x = norm(h, "blk.0.ffn_norm")
    gate = layer(x, "ffn_gate")
    h = h + layer(gate / (1 + np.exp(-gate)) * layer(x, "ffn_up"), "ffn_down")
    scores: Array = weight["output.weight"] @ norm(h, "output_norm")
    return scores


def test_another_target(store: ModelStore) -> None:
    eagle = store.path("eagle3")
    with pytest.raises(PairError, match="drafts for another target"):
        open_pair(store.path("llama", Recipe(width=128)), eagle, target_options=ONE_THREAD)
    with pytest.raises(PairError, match=r"hidden rows that llama.cpp does not hand out for 'gemma3'"):
        open_pair(store.path("gemma3"), eagle, target_options=ONE_THREAD)
    with pytest.raises(ModelFileError, match="no whole model but a part of one"):
        open_pair(eagle, target_options=ONE_THREAD)


@pytest.fixture
def untrusting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trial.TRUST)
    monkeypatch.setenv("LLAMASPEC_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("untrusting")
@pytest.mark.parametrize("kind", ["eagle3", "eagle3-bare"])
def test_a_sound_file_passes_its_trial(store: ModelStore, kind: str) -> None:
    Weights(store.path(kind), ONE_THREAD).close()


@pytest.mark.usefixtures("untrusting")
def test_a_file_that_names_tokens_beyond_the_vocabulary_ends_no_process(tmp_path: Path) -> None:
    path = write_eagle3(tmp_path / "eagle3.gguf")
    reader = gguf.GGUFReader(path, "r+")
    (tokens,) = (tensor for tensor in reader.tensors if tensor.name == "d2t")
    tokens.data[-1] = 1 << 20
    reader.data.flush()
    with pytest.raises(ModelFileError, match="download or convert it again"):
        Weights(path, ONE_THREAD)


def test_a_build_without_the_functions(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_files, "has_layer_rows", lambda: False)
    with pytest.raises(PairError, match="this build of llama"):
        open_pair(store.path("llama"), store.path("eagle3"))


def test_the_commands_take_it(store: ModelStore) -> None:
    files: list[str | Path] = [
        "--target",
        store.path("llama"),
        "--draft",
        store.path("eagle3"),
        "--threads",
        "1",
    ]
    wanted = ("-n", "12", "--seed", "5", "--json", "--draft-length", "2", "-p", "x")
    found = invoke("generate", *files, *wanted).json
    assert found["statistics"]["drafted"] > 0
    assert found["draft"] == str(store.path("eagle3"))
    findings = {f["topic"]: f["text"] for f in invoke("doctor", *files, "--json").json["findings"]}
    assert "reads hidden rows of the target" in findings["draft"]


def test_a_draft_by_dflash_is_refused(target_file: Path, tmp_path: Path) -> None:
    path = write_vocabulary_only(tmp_path / "dflash.gguf", architecture="dflash")
    answer = invoke("generate", "--target", target_file, "--draft", path, "-n", "2", "x")
    assert answer.code != 0
    assert "drafts by DFlash, which llamaspec does not have; name an EAGLE-3 or a draft model" in said(answer)
