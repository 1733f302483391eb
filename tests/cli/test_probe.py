"""`llamaspec probe`: what it measures, keeps and prints."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from command import generate, invoke, naming, run
from hub_server import Hub
from llamaspec import LlamaModel, ModelOptions, Pair, open_pair
from llamaspec.cli.options import Drafting, make_policy
from llamaspec.length.costs import CostCurve
from llamaspec.llama import runtime
from llamaspec.measure.exactness import Exactness, find_exactness, prompts_are_exact
from llamaspec.measure.probe import Effort, measure
from llamaspec.measure.reasons import dips, saturation_width, verdict
from llamaspec.measure.store import known_exactness
from llamaspec.values import ForwardRequest, Logits

Batch = list[tuple[int, ForwardRequest]]

FOURS = CostCurve((1, 2, 3, 4, 5), (1.0, 1.6, 2.2, 1.8, 2.6), 0.05)
STEEP = CostCurve((1, 2, 4), (1.0, 2.1, 4.2), 0.05)
FLAT = CostCurve((1, 2, 4), (1.0, 1.05, 1.1), 0.05)

pytestmark = pytest.mark.usefixtures("own_cache")


def test_what_the_curve_says() -> None:
    assert dips(FOURS) == {3: 4}
    assert dips(FLAT) == {}
    assert [saturation_width(curve) for curve in (STEEP, FLAT)] == [1, 4]
    wide = CostCurve((*STEEP.widths, 8, 9), (*STEEP.verify_seconds, 8.4, 9.4), 0.05)
    assert "slower at any acceptance" in verdict(wide)
    assert verdict(STEEP).endswith("unknown: batch sizes were timed only up to 4")
    assert verdict(FLAT).endswith("faster above an acceptance of 2 to 18%")  # 1 + a > 1.1, 7 % less and more


def test_json_has_the_widths_the_conclusions_and_the_verdict(models: list[Path]) -> None:
    found = invoke("probe", *naming(models), "--quick", "--json").json
    assert [row["width"] for row in found["widths"]][:4] == [1, 2, 3, 4]
    assert all(len(row["timings"]) == len(found["depths"]) == 2 for row in found["widths"])
    assert all(t["low"] <= t["median"] <= t["high"] for row in found["widths"] for t in row["timings"])
    assert found["widths"][0]["logit_difference"] == 0
    assert found["identical_widths"][0] == 1
    assert found["draft_step"]["median"] > 0
    assert found["kernels"] == runtime.kernels().level
    assert set(found["best_fixed_length"]) == {"0.5", "0.6", "0.7", "0.8", "0.9", "0.95"}
    widths, costs = zip(
        *((row["width"], row["timings"][0]["median"]) for row in found["widths"]), strict=True
    )
    assert found["verdict"] == verdict(CostCurve(widths, costs, found["draft_step"]["median"]))


def test_both_ways_of_attention_are_measured_unless_it_has_to_be_quick(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    effort = Effort(widths=(1, 2), depths=(16, 300), most_turns=1, n_compared=4)
    monkeypatch.setattr("llamaspec.cli.measure.FULL", effort)
    found = invoke("probe", *naming(models), "--json").json
    assert [timing["depth"] for timing in found["attention"]] == [16, 300]
    assert set(found["flash_attn_off_speed_up"]) == {"16", "300"}
    assert set(found["flash_attn_off_pays"]) <= {16, 300}
    assert all(t[way]["low"] > 0 for t in found["attention"] for way in ("on", "off"))
    assert invoke("probe", *naming(models), "--show", "--json").json == found
    told = " ".join(invoke("probe", *naming(models), "--show").stdout.split())
    assert f"computed with {runtime.kernels().describe()}" in told
    assert "with 16 tokens in the KV cache, --flash-attn off" in told
    assert "with 300 tokens in the KV cache, --flash-attn off" in told
    monkeypatch.setattr("llamaspec.cli.measure.QUICK", effort)
    assert invoke("probe", *naming(models), "--quick", "--json").json["attention"] == []


def test_what_was_found_is_shown_again_and_forgotten(models: list[Path]) -> None:
    options = naming(models)
    assert "without --show" in invoke("probe", *options, "--show").stderr
    assert "no such model file" in invoke("probe", "--target", "missing.gguf", "--forget").stderr
    first = invoke("probe", *options, "--quick", "--json").json
    assert invoke("probe", *options, "--show", "--json").json == first
    assert (
        "without --show" in invoke("probe", *options, "--threads", "2", "--show").stderr
    )  # of another machine
    for told in (
        "llamaspec: deleted the stored result",
        "llamaspec: there is no stored result for this pair",
    ):
        forgot = invoke("probe", *options, "--forget")
        assert (forgot.code, forgot.stdout, forgot.complaints) == (0, "", [told])
    assert "without --show" in invoke("probe", *options, "--show").stderr


@pytest.mark.parametrize("option", ["--show", "--forget"])
def test_a_pair_that_is_not_here_is_not_fetched(env: dict[str, str], hub: Hub, option: str) -> None:
    """Both used to fetch the models first."""
    answer = run("probe", "--pair", "big", option, env=env)
    assert answer.code == 1
    assert "big is not on this machine; run `llamaspec models pull big`" in answer.stderr
    assert hub.n_requests == 0


def test_a_damaged_file_counts_as_none(models: list[Path], tmp_path: Path) -> None:
    invoke("probe", *naming(models), "--quick")
    learnt = set((tmp_path / "curves").glob("*.runs.json"))
    (kept,) = set((tmp_path / "curves").iterdir()) - learnt
    for damage in ("", "{", "[]", '{"format": 1}', '{"format": 0, "probe": {}}'):
        kept.write_text(damage)
        assert generate("-n", "5", "hello", models=models).code == 0
        assert "without --show" in invoke("probe", *naming(models), "--show").stderr


def test_the_table_ends_with_the_verdict(models: list[Path]) -> None:
    answer = invoke("probe", *naming(models), "--quick")
    assert "differs by: largest difference of a logit from batch size 1" in " ".join(answer.stdout.split())
    found = invoke("probe", *naming(models), "--show", "--json").json
    assert " ".join(answer.stdout.split()).endswith(found["verdict"])


def test_it_ends_when_its_time_is_over(models: list[Path]) -> None:
    ticks = itertools.count()
    with LlamaModel(models[0]) as target, LlamaModel(models[1]) as draft:
        pair = Pair(target, draft, clock=lambda: float(next(ticks)))
        effort = Effort(widths=(1, 2), depths=(8,), most_turns=50, seconds=1.0)
        probe = measure(pair, effort)
    assert all(row.timings[0].median == 1 for row in probe.widths)
    assert next(ticks) < 400


def test_widths_that_round_otherwise_are_not_exact(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = LlamaModel.evaluate

    def biased(self: LlamaModel, batch: Batch, n_padding: int = 0) -> list[Logits]:
        answers = honest(self, batch, n_padding)
        return [answer + (1e-3 if len(answer) > 4 else 0) for answer in answers]

    monkeypatch.setattr(LlamaModel, "evaluate", biased)
    with open_pair(*models) as pair:
        assert max(find_exactness(pair).widths) <= 4


def test_prompts_that_are_rounded_otherwise_are_not_exact(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts processed at once have other bits than those processed in chunks."""
    honest, is_wide = LlamaModel.evaluate, [False]

    def biased(self: LlamaModel, batch: Batch, n_padding: int = 0) -> list[Logits]:
        ((row, request),) = batch
        if not request.n_scored:
            held = self.cached(row)
            assert held is not None
            is_wide[0] = request.n_tokens - held.n > 8
        return [answer + 1e-3 * is_wide[0] for answer in honest(self, batch, n_padding)]

    with open_pair(*models, target_options=ModelOptions(cache_type_v="bf16")) as pair:
        width = max(find_exactness(pair).widths)
        assert prompts_are_exact(pair, min(width, 8)) == (width > 1)
        monkeypatch.setattr(LlamaModel, "evaluate", biased)
        assert not prompts_are_exact(pair, min(width, 8))


def test_what_is_exact_is_found_out_once(
    models: list[Path], monkeypatch: pytest.MonkeyPatch, own_cache: None
) -> None:
    options = ModelOptions(cache_type_v="bf16")
    with open_pair(*models) as usual, open_pair(*models, target_options=options) as other:
        known, hurried = Exactness((1, 3), reads=True), Exactness((1,), reads=False, is_whole=False)
        monkeypatch.setattr("llamaspec.measure.store.find_exactness", lambda pair: hurried)
        assert known_exactness(usual) == hurried  # not kept
        monkeypatch.setattr("llamaspec.measure.store.find_exactness", lambda pair: known)
        assert known_exactness(usual) == known
        monkeypatch.setattr(
            "llamaspec.measure.store.find_exactness", lambda pair: Exactness((1,), reads=False)
        )
        assert known_exactness(usual) == known
        assert known_exactness(other) == Exactness((1,), reads=False)  # of other attention


def test_without_draft_tokens_exact_widths_are_kept_to(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Exactness((1, 3), reads=False)
    drafting = Drafting(0, exact=True)
    with open_pair(*models) as pair:
        length = make_policy(pair, drafting, known).start_sequence()
        assert [length.width(n) for n in (1, 2, 3, 4)] == [1, 3, 3, None]
        assert pair.target.prompt_chunk == 64
        assert pair.target.max_chunked_prefill == 0


def test_exact_evaluates_only_identical_widths(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    known = Exactness((1, 3), reads=True)
    monkeypatch.setattr("llamaspec.cli.options.known_exactness", lambda pair, tell: known)
    asked: list[int] = []
    honest = LlamaModel.evaluate

    def noted(self: LlamaModel, batch: Batch, n_padding: int = 0) -> list[Logits]:
        if self.path == models[0]:
            n_scored = sum(request.n_scored for _, request in batch)
            asked.append(n_scored + n_padding if n_scored else 0)
        return honest(self, batch, n_padding)

    monkeypatch.setattr(LlamaModel, "evaluate", noted)
    answer = generate("-n", "80", "--seed", "1", "--exact", "--json", "hello", models=models)
    assert answer.code == 0
    assert set(asked) <= {0, 1, 3}
