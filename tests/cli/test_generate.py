"""`llamaspec generate` through its real entry point: its output, and why it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command import PROMPT, expected, generate, invoke, naming, run
from llamaspec import Sampling
from llamaspec.llama.context import Context
from model_store import ModelStore
from tiny_models import Recipe
from tiny_vocabulary import BYTES

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
    right = expected(models, 5, 30)
    assert (found["text"], found["tokens"]) == (right.text, list(right.tokens))
    assert found["draft"] == (None if lengths == ["--no-draft"] else str(models[1]))
    assert statistics["accepted"] <= statistics["verified"] <= statistics["drafted"]
    assert statistics["accepted"] + statistics["rounds"] == 30
    seconds = statistics["seconds"]
    assert seconds["decode"] == pytest.approx(seconds["draft"] + seconds["verify"] + seconds["overhead"])
    if lengths in (["--no-draft"], ["-k", "0"]):
        assert statistics["rounds_without_draft"] == statistics["rounds"] == 30
    if lengths == ["-k", "3"]:
        assert 0.3 < statistics["acceptance_rate"] < 1


def test_json_is_one_line_of_ascii_in_a_process(models: list[Path]) -> None:
    answer = run("generate", *naming(models), PROMPT, "-n", "20", "--seed", "5", "--json")
    assert answer.stdout.isascii()
    assert answer.stdout.endswith("}\n")
    assert answer.json["text"] == expected(models, 5, 20).text


@pytest.mark.parametrize("seed", ["7", str(2**63), "-2"])
def test_no_draft_says_the_same(models: list[Path], seed: str) -> None:
    answers = [
        generate(PROMPT, "-n", "40", "--seed", seed, "--json", *more, models=models).json["tokens"]
        for more in (["--no-draft"], ["-k", "6"], [])
    ]
    assert answers[1:] == answers[:1] * 2


def test_sampling_options_reach_the_sampler(models: list[Path]) -> None:
    penalties = Sampling(
        temperature=1.1, top_k=7, top_p=0.8, min_p=None, repeat_penalty=1.2, presence_penalty=0.3
    )
    answer = generate(
        PROMPT, "-t", "1.1", "--top-k", "7", "--top-p", "0.8", "--min-p", "0", "--repeat-penalty", "1.2",
        "--presence-penalty", "0.3", "--seed", "2", "-n", "50", "--json", models=models,
    )  # fmt: skip
    assert answer.json["tokens"] == list(expected(models, 2, 50, sampling=penalties).tokens)


def test_minus_one_is_a_random_seed(models: list[Path]) -> None:
    options = ["-n", "1", "--temp", "1", "--seed", "-1"]
    answers = [invoke("generate", *naming(models), *options, "x") for _ in "ab"]
    seeds = [answer.stderr.partition(", seed ")[2].split()[0] for answer in answers]
    assert seeds[0] != seeds[1]
    assert "-1" not in seeds


def test_swapped_models_are_told(demo_files: tuple[Path, Path]) -> None:
    target, draft = demo_files
    for order, is_told in (([draft, target], True), ([target, draft], False)):
        answer = invoke("generate", *naming(order), "-n", "1", "x")
        assert ("swap --target and --draft" in answer.stderr) == is_told


def test_the_seed_is_reported_and_reproduces(models: list[Path]) -> None:
    first = generate(PROMPT, "-n", "30", "--json", models=models).json
    other = generate(PROMPT, "-n", "30", "--json", models=models).json
    again = generate(PROMPT, "-n", "30", "--json", "--seed", str(first["seed"]), models=models).json
    assert again["text"] == first["text"]
    assert other["seed"] != first["seed"]
    assert other["text"] != first["text"]


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
    answer = invoke("generate", "import os\n", "-n", "16", "--json")
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


def test_a_full_context(models: list[Path]) -> None:
    arguments = [PROMPT, "--n-ctx", "256", "-n", "1000", "--seed", "1", "-k", "4"]
    found = generate(*arguments, "--json", models=models).json
    assert found["stop_reason"] == "context"
    assert found["prompt_tokens"] + len(found["tokens"]) == 256
    text = generate(*arguments, models=models)
    assert text.code == 0
    assert text.stdout == found["text"] + "\n"
    assert "llamaspec: the context is full; raise --n-ctx to continue\n" in text.stderr


LONG = Recipe(dtype="q8_0", n_context=6000)
SAYS = "{% for message in messages %}{{ message.content }}{% endfor %}"
OTHER = replace(LONG.draft(), vocabulary=BYTES.renamed(70, "other"))


@pytest.mark.parametrize(
    ("draft", "options", "sizes"),
    [
        (LONG.draft(), ["-n", "9"], [512, 512]),
        (LONG.draft(), ["-n", "900"], [1280, 1280]),
        (LONG.draft(), ["-n", "9", "--chat", "--system", 500 * "b ", "--chat-template", SAYS], [1280, 1280]),
        (LONG.draft(), ["-n", "-1"], [6000, 6000]),
        (LONG.draft(), ["-n", "9", "--n-ctx", "1000"], [1000, 1000]),
        (LONG.draft(), ["-n", "9", "--draft-ctx", "300"], [512, 300]),
        (OTHER, ["-n", "9"], [512, 6000]),  # a text may have more tokens of the draft
    ],
)
def test_contexts_are_as_large_as_the_text_can_need(
    store: ModelStore,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    draft: Recipe,
    options: list[str],
    sizes: list[int],
) -> None:
    """Touching the memory of the whole training context took longer than a short text."""
    opened, open_context = [], Context.__init__

    def noted(self: Context, *given: Any, **named: Any) -> None:
        open_context(self, *given, **named)
        opened.append(self.context_size)

    monkeypatch.setattr(Context, "__init__", noted)
    (tmp_path / "template").write_text(SAYS)
    named = [str(tmp_path / "template") if each == SAYS else each for each in options]
    models = [store.path("llama", recipe) for recipe in (LONG, draft)]
    found = generate("the end", *named, "-k", "3", "--stop", "e", "--seed", "5", models=models)
    assert (found.code, opened) == (0, sizes)


def test_the_size_of_the_context_changes_no_text(store: ModelStore) -> None:
    models = [store.path("llama", recipe) for recipe in (LONG, LONG.draft())]
    arguments = [PROMPT, "-n", "480", "--seed", "1", "-k", "4", "--json"]
    small, whole = (generate(*arguments, *more, models=models).json for more in ([], ["--n-ctx", "6000"]))
    for each in (small, whole):
        del each["statistics"]["seconds"], each["statistics"]["tokens_per_second"]
    assert small == whole
    assert (len(small["tokens"]), small["stop_reason"]) == (480, "limit")


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
