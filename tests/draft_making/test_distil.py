"""Distillation of tiny models for some seconds, if torch is installed (the extra `train`)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")

from llamaspec import LlamaModel, ModelOptions, open_pair  # noqa: E402
from llamaspec.draft_making.distil import Distillation, distil_draft, record  # noqa: E402
from llamaspec.draft_making.student import Llama, Shape, loss_of, write_model  # noqa: E402
from llamaspec.errors import LlamaspecError, PromptError  # noqa: E402
from llamaspec.measure.probe import TEXT, sample_tokens  # noqa: E402
from llamaspec.plan import made_drafts, made_path  # noqa: E402
from plain_llama import PlainLlama  # noqa: E402

OPTIONS = ModelOptions(threads=1)
LENGTH = 32
SMALL = Distillation(minutes=0.05, n_layers=1, width=64, length=LENGTH, batch=128)


@pytest.fixture
def target(target_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(target_file, tmp_path / "target.gguf"))


def test_a_distilled_draft_drafts_for_its_target(target: Path) -> None:
    output, said = made_path(target, "distilled"), list[str]()
    distil_draft(target, OPTIONS, [2 * TEXT.encode()], SMALL, output, said.append)
    assert "tokens, about" in said[0], "the expected time is logged first"
    assert made_drafts(target) == [output]
    assert sorted(target.parent.iterdir()) == sorted([target, output]), "nothing else is left"
    with open_pair(target, "auto", target_options=OPTIONS, draft_options=OPTIONS) as pair:
        assert pair.draft is not None
        assert pair.draft.path == output
        for token in range(pair.target.vocabulary_size):
            assert pair.draft.vocabulary.text(token) == pair.target.vocabulary.text(token)
        drafted = pair.stream("def f(", seed=3, max_tokens=12).run()
    with open_pair(target, target_options=OPTIONS) as alone:
        assert alone.stream("def f(", seed=3, max_tokens=12).run().tokens == drafted.tokens


def test_an_interrupted_distillation_resumes(target: Path) -> None:
    output = made_path(target, "distilled")
    heard: list[float] = []

    def stop(fraction: float) -> None:
        heard.append(fraction)
        if 1.0 in heard[:-2]:  # the text is recorded, and one training step is done
            raise KeyboardInterrupt

    texts, slow = [TEXT.encode()], replace(SMALL, minutes=1.0)  # time for two steps on a busy machine
    with pytest.raises(KeyboardInterrupt):
        distil_draft(target, OPTIONS, texts, slow, output, lambda line: None, stop)
    assert not output.exists()
    folder = output.with_name(f".{output.name}.distilling")
    left = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert left["steps"] > 0
    with pytest.raises(LlamaspecError, match="another distillation"):
        distil_draft(target, OPTIONS, [b"x" * 999], SMALL, output, lambda line: None)

    resumed: list[float] = []
    distil_draft(target, OPTIONS, texts, SMALL, output, lambda line: None, resumed.append)
    assert resumed[0] >= left["done"] > 0, "no window is recorded again, and the training continues"
    assert output.exists()
    assert not folder.exists()


def test_a_short_text_is_refused(target: Path) -> None:
    with pytest.raises(PromptError, match="better millions"):
        distil_draft(target, OPTIONS, [b"short"], SMALL, target.with_name("d.gguf"), lambda line: None)


def test_a_full_disk_is_found_at_the_start(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(LlamaspecError, match="GB free"):
        distil_draft(target, OPTIONS, [TEXT.encode()], SMALL, target.with_name("d.gguf"), lambda line: None)


def test_the_record_has_the_targets_probabilities(target: Path, tmp_path: Path) -> None:
    options = ModelOptions(threads=1, n_ctx=LENGTH, max_scored=LENGTH)
    with LlamaModel(target, options) as model:
        tokens = sample_tokens(model.vocabulary, 3 * LENGTH + 5)
        recorded = record(model, tokens, LENGTH, tmp_path, lambda fraction: None)
    assert recorded.tokens.shape == (3, LENGTH)
    with PlainLlama(target) as plain:
        logits = plain.logits(recorded.tokens[1].tolist())
    log_p = torch.log_softmax(torch.from_numpy(logits), -1)
    wanted, ids = log_p.topk(recorded.best.shape[-1])
    ours = np.sort(recorded.log_p[1].astype(np.float32))[:, ::-1]
    assert np.abs(ours - wanted.numpy()).max() < 0.02
    assert set(recorded.best[1, 7].tolist()) == set(ids[7].tolist())


def test_the_gradient_is_that_of_the_loss() -> None:
    torch.manual_seed(0)
    features = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    p = torch.softmax(torch.randn(5, 20), -1)
    log_p, ids = p.log().topk(4)
    loss = loss_of(features, weight, ids, log_p)
    loss.backward()
    found = features.grad.clone(), weight.grad.clone()
    features.grad = weight.grad = None
    log_q = torch.log_softmax((features @ weight.to(torch.bfloat16).T).float(), -1)
    rest_p, rest_q = 1 - log_p.exp().sum(-1), 1 - log_q.exp().gather(-1, ids).sum(-1)
    parts = (log_p.exp() * (log_p - log_q.gather(-1, ids))).sum(-1) + rest_p * (rest_p / rest_q).log()
    parts.mean().backward()
    assert loss.item() == pytest.approx(parts.mean().item(), rel=1e-3)
    for ours, theirs in zip(found, (features.grad, weight.grad), strict=True):
        assert torch.allclose(ours.float(), theirs.float(), atol=0.02)


def test_the_file_is_the_trained_model(tmp_path: Path) -> None:
    """torch in float32 and llama.cpp compute the same logits."""
    torch.manual_seed(0)
    model = Llama(Shape(2, 64, 1, 192, 300, 64))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)

    def describe(writer: object) -> None:
        writer.add_tokenizer_model("none")  # type: ignore[attr-defined]

    write_model(tmp_path / "model.gguf", model, describe)
    tokens = [3, 1, 250, 17, 17, 99]
    with PlainLlama(tmp_path / "model.gguf") as plain:
        theirs = plain.logits(tokens)
    with torch.no_grad():
        ours = model.logits(model.hidden(torch.tensor([tokens]), dtype=torch.float32)[0]).numpy()
    assert np.abs(ours - theirs).max() < 0.1
    assert np.abs(ours).max() > 1.0
