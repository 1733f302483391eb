"""`llamaspec generate` through its real entry point: its output, and why it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import PROMPT, expected, generate, invoke, naming, run
from llamaspec import Sampling
from model_store import ModelStore
from tiny_models import Recipe
from tiny_vocabulary import BYTES

KEYS = {
    "text", "tokens", "prompt_tokens", "cached_tokens", "stop_reason", "seed", "rule", "target", "draft",
    "statistics",
}  # fmt: skip
STATISTICS = {
    "rounds", "rounds_without_draft", "drafted", "verified", "accepted", "acceptance_rate",
    "accepted_histogram", "mean_tokens_per_round", "tokens_per_second", "seconds",
    "unused_draft", "draft_fault",
}  # fmt: skip
SECONDS = {"load", "prompt", "draft", "verify", "overhead", "decode", "constraint"}
LONG = Recipe(dtype="q8_0", n_context=1 << 15)


# What comes out


def test_only_the_text_on_stdout(models: list[Path]) -> None:
    arguments = ["generate", *naming(models), PROMPT, "--seed", "5", "-n", "40", "--draft-length", "3"]
    answer = run(*arguments)
    assert answer.code == 0
    assert answer.stdout == expected(models, 5, 40).text + "\n"
    assert "seed 5" in answer.stderr
    assert "tokens/s" in answer.stderr
    assert "draft tokens accepted; " in answer.stderr
    assert "time: draft" not in answer.stderr
    full = invoke(*arguments, "--stats", "full")
    assert "draft tokens accepted" in full.stderr
    assert "time: draft" in full.stderr


@pytest.mark.parametrize("with_draft", [False, True])
def test_ngram_drafts_leave_the_text_alone(models: list[Path], with_draft: bool) -> None:
    prompt = "the end of the end of the end of"
    plain = generate(prompt, "-n", "30", "--seed", "2", "--no-draft", "--json", models=models).json
    options = ("--ngram",) if with_draft else ("--draft", "ngram")
    files = models if with_draft else models[:1]
    for length in ("auto", "4"):
        found = generate(
            prompt, *options, "-n", "30", "--seed", "2", "-k", length, "--json", models=files
        ).json
        assert found["tokens"] == plain["tokens"]


def test_a_run_without_draft_tokens_says_so(models: list[Path]) -> None:
    answer = generate(PROMPT, "-n", "5", "--draft-length", "0", models=models)
    assert "no draft token was proposed; " in answer.stderr


def test_no_stats_is_silent(models: list[Path]) -> None:
    answer = generate(PROMPT, "--no-stats", "-n", "5", models=models)
    assert answer.complaints == []
    both = generate(PROMPT, "--no-stats", "--stats", models=models)
    assert (both.code, "contradict each other" in both.stderr) == (2, True)


@pytest.mark.parametrize("lengths", [["-k", "3"], [], ["--no-draft"], ["-k", "0"]], ids=str)
def test_the_json_line(models: list[Path], lengths: list[str]) -> None:
    answer = generate(PROMPT, *lengths, "--seed", "5", "-n", "30", "--json", models=models)
    assert answer.complaints == []
    found, statistics = answer.json, answer.json["statistics"]
    assert set(found) == KEYS
    assert set(statistics) == STATISTICS
    assert set(statistics["seconds"]) == SECONDS
    right = expected(models, 5, 30)
    assert found["text"] == right.text
    assert found["tokens"] == list(right.tokens)
    assert (found["stop_reason"], found["seed"], found["rule"]) == ("limit", 5, "coupled")
    assert found["target"] == str(models[0])
    assert found["draft"] == (None if lengths == ["--no-draft"] else str(models[1]))

    assert sum(statistics["accepted_histogram"]) == statistics["rounds"]
    assert statistics["accepted"] == sum(i * n for i, n in enumerate(statistics["accepted_histogram"]))
    assert statistics["accepted"] <= statistics["verified"] <= statistics["drafted"]
    assert statistics["accepted"] + statistics["rounds"] == 30
    assert statistics["mean_tokens_per_round"] == pytest.approx(30 / statistics["rounds"])
    seconds = statistics["seconds"]
    assert all(value >= 0 for value in seconds.values())
    assert seconds["decode"] == pytest.approx(seconds["draft"] + seconds["verify"] + seconds["overhead"])
    assert statistics["tokens_per_second"] == pytest.approx(30 / seconds["decode"])
    if lengths in (["--no-draft"], ["-k", "0"]):
        assert statistics["acceptance_rate"] is None
        assert statistics["rounds_without_draft"] == statistics["rounds"] == 30
    if lengths == ["-k", "3"]:
        assert statistics["acceptance_rate"] == statistics["accepted"] / statistics["verified"]
        assert 0.3 < statistics["acceptance_rate"] < 1


def test_json_is_one_line_of_ascii_in_a_process(models: list[Path]) -> None:
    answer = run("generate", *naming(models), PROMPT, "-n", "20", "--seed", "5", "--json")
    assert answer.stdout.isascii()
    assert answer.stdout.endswith("}\n")
    assert answer.json["text"] == expected(models, 5, 20).text


@pytest.mark.parametrize("seed", [7, 2**63, -1])
@pytest.mark.parametrize(
    "sampling",
    [
        [],
        ["-t", "0"],
        ["-t", "1.5", "--top-k", "0", "--top-p", "1", "--min-p", "0"],
        ["--repeat-penalty", "1.3", "--presence-penalty", "0.5", "--frequency-penalty", "0.2"],
    ],
    ids=str,
)
def test_no_draft_says_the_same(models: list[Path], seed: int, sampling: list[str]) -> None:
    common = [PROMPT, "-n", "40", "--seed", str(seed), "--json", *sampling]
    answers = [
        generate(*common, *more, models=models).json["tokens"]
        for more in (["--no-draft"], ["-k", "1"], ["-k", "6"], [])
    ]
    assert answers[1:] == answers[:1] * 3


def test_sampling_options_reach_the_sampler(models: list[Path]) -> None:
    penalties = Sampling(
        temperature=1.1, top_k=7, top_p=0.8, min_p=None, repeat_penalty=1.2, presence_penalty=0.3
    )
    answer = generate(
        PROMPT, "-t", "1.1", "--top-k", "7", "--top-p", "0.8", "--min-p", "0", "--repeat-penalty", "1.2",
        "--presence-penalty", "0.3", "--seed", "2", "-n", "50", "--json", models=models,
    )  # fmt: skip
    assert answer.json["tokens"] == list(expected(models, 2, 50, sampling=penalties).tokens)


def test_the_seed_is_reported_and_reproduces(models: list[Path]) -> None:
    first = generate(PROMPT, "-n", "30", "--json", models=models).json
    other = generate(PROMPT, "-n", "30", "--json", models=models).json
    again = generate(PROMPT, "-n", "30", "--json", "--seed", str(first["seed"]), models=models).json
    assert again["text"] == first["text"]
    assert other["seed"] != first["seed"]
    assert other["text"] != first["text"]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules(models: list[Path], rule: str) -> None:
    answer = generate(PROMPT, "--rule", rule, "-k", "3", "-n", "40", "--seed", "1", "--json", models=models)
    assert answer.json["rule"] == rule
    assert len(answer.json["tokens"]) == 40
    assert 0 < answer.json["statistics"]["accepted"] < answer.json["statistics"]["verified"]


def test_models_from_the_environment(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMASPEC_TARGET", str(models[0]))
    monkeypatch.setenv("LLAMASPEC_DRAFT", str(models[1]))
    answer = invoke("generate", PROMPT, "-n", "3", "--json", "--threads", "1")
    assert (answer.json["target"], answer.json["draft"]) == (str(models[0]), str(models[1]))


def test_a_target_without_a_draft(models: list[Path]) -> None:
    answer = generate(PROMPT, "-n", "5", "--no-ngram", "--json", models=models[:1])
    assert answer.json["draft"] is None
    assert "no --draft given, decoding plainly" in answer.stderr


def test_the_embedded_pair(demo_files: tuple[Path, Path]) -> None:
    answer = run("generate", "import os\n", "-n", "16", "--json")
    assert answer.code == 0
    assert "no --target given, using the small embedded pair" in answer.stderr
    assert (answer.json["target"], answer.json["draft"]) == tuple(map(str, demo_files))
    assert len(answer.json["tokens"]) == 16


# Why a text ends


def test_stop_strings(models: list[Path]) -> None:
    whole = expected(models, 4, 80).text
    first, second = whole[20:23], whole[40:44]
    for stops in ([first], [second, first], ["never comes", first]):
        options = [part for stop in stops for part in ("--stop", stop)]
        answer = generate(PROMPT, "--seed", "4", "-n", "80", "--json", *options, models=models)
        assert answer.json["stop_reason"] == "stop"
        assert answer.json["text"] == whole[: min(whole.index(stop) for stop in stops if stop in whole)]


def test_the_end_of_text(store: ModelStore) -> None:
    target = store.path("llama", Recipe(dtype="q8_0", end_score=6.0))
    answer = generate(PROMPT, "--seed", "1", "-n", "400", "--json", models=[target, target])
    assert answer.json["stop_reason"] == "end"
    assert 0 < len(answer.json["tokens"]) < 400
    assert BYTES.eos not in answer.json["tokens"]


def test_a_full_context(models: list[Path]) -> None:
    arguments = [PROMPT, "--n-ctx", "256", "-n", "1000", "--seed", "1", "-k", "4"]
    found = generate(*arguments, "--json", models=models).json
    assert found["stop_reason"] == "context"
    assert found["prompt_tokens"] + len(found["tokens"]) == 256
    text = run("generate", *naming(models), *arguments)
    assert text.code == 0
    assert text.stdout == found["text"] + "\n"
    assert "llamaspec: the context is full; raise --n-ctx to continue\n" in text.stderr


def test_a_small_draft_context_costs_draft_tokens_only(models: list[Path]) -> None:
    arguments = [PROMPT, "-n", "400", "--seed", "1", "-k", "4", "--json"]
    small = generate(*arguments, "--draft-ctx", "256", models=models).json
    assert small["tokens"] == generate(*arguments, models=models).json["tokens"]
    assert small["statistics"]["acceptance_rate"] > 0.2


def test_a_context_beyond_the_trained_one_warns(models: list[Path]) -> None:
    answer = generate(PROMPT, "-n", "3", "--n-ctx", "1024", "--no-stats", models=models)
    assert answer.code == 0
    assert len(answer.complaints) == 2
    assert "warning: target context: 1024 tokens, trained on 512: text may" in answer.complaints[0]
    assert "warning: draft context: 1024 tokens, trained on 512" in answer.complaints[1]


def test_a_long_prompt_is_prefilled_in_parts(store: ModelStore, tmp_path: Path) -> None:
    models = [store.path("llama", LONG), store.path("llama", LONG.draft())]
    file = tmp_path / "long.txt"
    file.write_text("the end of it and " * 150)
    answers = [
        generate("-f", str(file), "-n", "12", "--seed", "1", "--json", *more, models=models).json
        for more in ([], ["--no-draft"])
    ]
    assert answers[0]["prompt_tokens"] > 1100
    assert answers[0]["tokens"] == answers[1]["tokens"]
