"""What the benchmark says of its arms: ratios to the baseline, and seconds, of answers that are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamaspec.measure.bench import Sample, baseline_of, first_difference
from llamaspec.measure.report import (
    PromptFigures,
    best_of,
    best_type,
    figures,
    figures_of_arms,
    grouped,
    prompt_figures,
)
from llamaspec.measure.served_arms import PEER, PEER_BEST, PEER_PLAIN, PLAIN

MOD, SIMPLE = f"{PEER}, ngram-mod", f"{PEER}, draft-simple"


def answer(seconds: float, first: float = 1.0, n: int = 11, differs_at: int | None = None) -> Sample:
    return Sample("arm", "group", "task", "prompt", 0, 7, n, seconds, first, None, None, differs_at)


def sample(arm: str, prompt: str, of: Sample, repeat: int = 0) -> Sample:
    return replace(of, arm=arm, prompt=prompt, repeat=repeat)


def test_ratios_are_to_the_answer_beside() -> None:
    samples = [
        sample(PLAIN, "a", answer(21.0)), sample("auto", "a", answer(11.0, first=6.0)),  # 10 tokens in 5 s
        sample(PLAIN, "a", answer(42.0, first=2.0), 1), sample("auto", "a", answer(7.0, first=3.0), 1),
        sample(PLAIN, "b", answer(5.0)), sample("auto", "b", answer(10.0, first=2.0)),
    ]  # fmt: skip
    by_prompt = prompt_figures(samples, "auto", PLAIN)
    assert [*by_prompt] == ["a", "b"]
    assert by_prompt["a"].whole == pytest.approx((21 / 11 + 42 / 7) / 2)  # the median of two
    assert by_prompt["a"].decoding == pytest.approx((20 / 5 + 40 / 4) / 2)
    assert (by_prompt["a"].seconds, by_prompt["a"].first_seconds) == (9.0, 4.5)
    assert by_prompt["a"].first == pytest.approx((1 / 6 + 2 / 3) / 2)
    assert (by_prompt["a"].total_seconds, by_prompt["a"].baseline_seconds) == (18.0, 63.0)
    assert by_prompt["b"].whole == 0.5
    assert by_prompt["b"].decoding == pytest.approx((10 / 8) / (10 / 4))
    assert prompt_figures(samples, PLAIN, PLAIN)["b"].whole == 1.0


def test_a_text_of_other_length_is_scaled_to_the_baselines() -> None:
    plain = answer(21.0, n=11)
    shorter = answer(5.0, first=1.0, n=5, differs_at=0)  # 1 s a token: 11 tokens would take 11 s
    found = prompt_figures([sample(PLAIN, "a", plain), sample("auto", "a", shorter)], "auto", PLAIN)["a"]
    assert found.whole == pytest.approx(21 / 11)
    assert found.total_seconds == pytest.approx(11.0)
    assert found.decoding == pytest.approx(1 / 0.5)
    assert found.forks == (0,)
    single = answer(4.0, first=4.0, n=1)
    found = prompt_figures([sample(PLAIN, "a", plain), sample("auto", "a", single)], "auto", PLAIN)["a"]
    assert (found.whole, found.decoding) == (21 / 4, None)


@pytest.mark.parametrize(
    ("text", "at"), [("abc", None), ("abd", 2), ("ab", 2), ("abcd", 3), ("", 0), ("xbc", 0)]
)
def test_where_texts_fork(text: str, at: int | None) -> None:
    assert first_difference(text, "abc") == at


def of(whole: float, decoding: float | None, seconds: float, forks: tuple[int, ...] = ()) -> PromptFigures:
    return PromptFigures(whole, decoding, whole / 2, seconds, seconds / 4, 3 * seconds, 21.0, forks, 3)


def test_prompts_are_folded() -> None:
    found = figures({"a": of(2.0, 3.0, 8.0), "b": of(0.5, None, 2.0, (7, 9)), "c": of(8.0, 12.0, 4.0)})
    assert found.whole == pytest.approx(2.0)
    assert found.spread == pytest.approx(4.0)  # the logarithms are -1, 1 and 3 times log 2
    assert (found.worst, found.worst_prompt) == (0.5, "b")
    assert found.decoding == pytest.approx(6.0)
    assert (found.seconds, found.first_seconds) == (4.0, 1.0)
    assert found.first == pytest.approx(1.0)
    assert (found.total_seconds, found.total) == (42.0, 63 / 42), "the long requests count most"
    assert found.forks == {"b": (7, 9)}
    assert (found.n_same, found.n_answers) == (7, 9)
    assert figures({"a": of(2.0, None, 8.0)}).spread == 1.0
    assert figures({"a": of(2.0, None, 8.0)}).decoding is None


def test_the_best_arm_of_each_prompt() -> None:
    arms = [
        {"a": of(2.0, 3.0, 8.0), "b": of(0.5, None, 2.0)},
        {"a": of(1.5, 9.0, 1.0), "b": of(0.6, 1.0, 3.0)},
    ]
    assert best_of(arms) == {"a": arms[0]["a"], "b": arms[1]["b"]}


def llama_servers(times: dict[str, tuple[float, float]]) -> list[Sample]:
    return [
        sample(arm, prompt, answer(seconds, differs_at=None if arm == PEER_PLAIN else 0))
        for arm, each in times.items()
        for prompt, seconds in zip("ab", each, strict=True)
    ]


def test_the_baseline_is_the_peer() -> None:
    """All ratios were to our own plain decoding; so nobody saw for months that it was the slower one."""
    times = {
        PLAIN: (8.0, 8.0),
        "auto": (2.0, 4.0),
        PEER_PLAIN: (4.0, 4.0),
        MOD: (1.0, 16.0),
        SIMPLE: (2.0, 5.0),
    }
    found = figures_of_arms(llama_servers(times))
    assert [*found] == [*times, PEER_BEST]
    whole = {arm: each.whole for arm, each in found.items()}
    assert whole[PLAIN] == pytest.approx(0.5), "ours is a row like any other"
    assert whole["auto"] == pytest.approx(2**0.5)
    assert whole[PEER_PLAIN] == 1.0
    assert (found["auto"].worst, found["auto"].worst_prompt) == (1.0, "b")
    assert found["auto"].total == pytest.approx(8 / 6)
    assert (found[PEER_PLAIN].n_same, found["auto"].n_same) == (2, 0), "texts are compared with the peer's"
    assert whole[SIMPLE] > whole[MOD]
    assert best_type(found) == SIMPLE, "which a user can know"
    assert whole[PEER_BEST] == pytest.approx((4 / 1 * 4 / 4) ** 0.5), (
        "the best of each prompt, which nobody can"
    )
    next_to = figures(prompt_figures(llama_servers(times), "auto", SIMPLE))
    assert next_to.whole == pytest.approx((2 / 2 * 5 / 4) ** 0.5)
    assert next_to.worst == 1.0


def test_without_the_peer_the_baseline_is_our_plain_arm() -> None:
    found = figures_of_arms(llama_servers({PLAIN: (8.0, 8.0), "auto": (2.0, 4.0)}))
    assert (found[PLAIN].whole, found["auto"].worst) == (1.0, 2.0)
    assert best_type(found) is None
    assert baseline_of(["auto", PLAIN, "-k 3"]) == PLAIN


def test_a_peer_that_drafts_in_vain_is_no_best_type() -> None:
    found = figures_of_arms(llama_servers({PLAIN: (8.0, 8.0), PEER_PLAIN: (4.0, 4.0), MOD: (4.0, 5.0)}))
    assert best_type(found) == PEER_PLAIN


def test_samples_are_grouped_by_their_fields() -> None:
    samples = [replace(sample("auto", "a", answer(1.0)), task=task) for task in ("x", "y", "x")]
    assert {name: len(each) for name, each in grouped(samples, "task").items()} == {"x": 2, "y": 1}
    assert [*grouped(samples, "group")] == ["group"]
