"""The benchmark's figures: ratios to the baseline and seconds, for known answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamaspec.measure.bench import (
    Sample,
    answer_pairs,
    baseline_of,
    best_of,
    best_type,
    figures,
    figures_of_arms,
)
from llamaspec.measure.compare import first_difference
from llamaspec.measure.served_arms import PEER, PEER_BEST, PEER_PLAIN, PLAIN

MOD, SIMPLE = f"{PEER}, ngram-mod", f"{PEER}, draft-simple"


def answer(seconds: float, first: float = 1.0, n: int = 11, differs_at: int | None = None) -> Sample:
    return Sample("arm", "group", "task", "prompt", 0, 7, n, seconds, first, None, None, differs_at)


def sample(arm: str, prompt: str, of: Sample, repeat: int = 0) -> Sample:
    return replace(of, arm=arm, prompt=prompt, repeat=repeat)


def test_ratios_compare_answers_to_the_same_request() -> None:
    samples = [
        sample(PLAIN, "a", answer(21.0)), sample("auto", "a", answer(11.0, first=6.0)),  # 10 tokens in 5 s
        sample(PLAIN, "a", answer(42.0, first=2.0), 1), sample("auto", "a", answer(7.0, first=3.0), 1),
        sample(PLAIN, "b", answer(5.0)), sample("auto", "b", answer(10.0, first=2.0)),
    ]  # fmt: skip
    pairs = answer_pairs(samples, "auto", PLAIN)
    assert [*pairs] == ["a", "b"]
    first, second = (figures({prompt: pairs[prompt]}) for prompt in "ab")
    assert first.whole == pytest.approx((21 / 11 + 42 / 7) / 2)  # the median of two
    assert first.decoding == pytest.approx((20 / 5 + 40 / 4) / 2)
    assert (first.seconds, first.first_seconds) == (9.0, 4.5)
    assert first.first == pytest.approx((1 / 6 + 2 / 3) / 2)
    assert (first.total_seconds, first.total) == (18.0, 63 / 18)
    assert second.whole == pytest.approx(0.5)
    assert second.decoding == pytest.approx((10 / 8) / (10 / 4))
    assert figures(answer_pairs(samples, PLAIN, PLAIN)).whole == 1.0


def test_an_answer_of_another_length_is_scaled_to_the_baselines() -> None:
    plain = answer(21.0, n=11)
    shorter = answer(5.0, first=1.0, n=5, differs_at=0)  # 1 s a token: 11 tokens would take 11 s
    found = figures(answer_pairs([sample(PLAIN, "a", plain), sample("auto", "a", shorter)], "auto", PLAIN))
    assert found.whole == pytest.approx(21 / 11)
    assert found.total_seconds == pytest.approx(11.0)
    assert found.decoding == pytest.approx(1 / 0.5)
    assert found.forks == {"a": (0,)}
    single = answer(4.0, first=4.0, n=1)
    found = figures(answer_pairs([sample(PLAIN, "a", plain), sample("auto", "a", single)], "auto", PLAIN))
    assert found.whole == pytest.approx(21 / 4)
    assert found.decoding is None


@pytest.mark.parametrize(
    ("text", "at"), [("abc", None), ("abd", 2), ("ab", 2), ("abcd", 3), ("", 0), ("xbc", 0)]
)
def test_where_answers_differ(text: str, at: int | None) -> None:
    assert first_difference(text, "abc") == at


def test_figures_of_several_prompts() -> None:
    """Whole requests are 2, 0.5 and 8 times as fast."""
    times = {"a": (8.0, 4.0), "b": (1.0, 2.0), "c": (64.0, 8.0)}
    samples = [
        sample(arm, prompt, answer(seconds, first=seconds / 4, differs_at=at), repeat)
        for prompt, each in times.items()
        for arm, seconds, at in ((PLAIN, each[0], None), ("auto", each[1], 7 if prompt == "b" else None))
        for repeat in range(3)
    ]
    found = figures(answer_pairs(samples, "auto", PLAIN))
    assert found.whole == pytest.approx(2.0)
    assert found.spread == pytest.approx(4.0)  # the logarithms are -1, 1 and 3 times log 2
    assert (found.worst, found.worst_prompt) == (0.5, "b")
    assert found.decoding == pytest.approx(2.0)
    assert (found.seconds, found.first_seconds) == (4.0, 1.0)
    assert found.first == pytest.approx(2.0)
    assert (found.total_seconds, found.total) == (42.0, 3 * 73 / 42), "the long requests count most"
    assert found.forks == {"b": (7, 7, 7)}
    assert (found.n_same, found.n_answers) == (6, 9)
    single = figures(answer_pairs(samples[:6], "auto", PLAIN))
    assert single.spread == 1.0


def test_the_best_arm_of_each_prompt() -> None:
    samples = llama_servers({PEER_PLAIN: (8.0, 8.0), MOD: (4.0, 16.0), SIMPLE: (5.0, 10.0)})
    arms = [answer_pairs(samples, arm, PEER_PLAIN) for arm in (MOD, SIMPLE)]
    assert best_of(arms) == {"a": arms[0]["a"], "b": arms[1]["b"]}


def llama_servers(times: dict[str, tuple[float, float]]) -> list[Sample]:
    return [
        sample(arm, prompt, answer(seconds, differs_at=None if arm == PEER_PLAIN else 0))
        for arm, each in times.items()
        for prompt, seconds in zip("ab", each, strict=True)
    ]


def test_the_baseline_is_the_peer() -> None:
    """All ratios were to our own plain decoding, which hid for months that it was the slower one."""
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
    assert (found[PEER_PLAIN].n_same, found["auto"].n_same) == (2, 0), "answers are compared with the peer's"
    assert whole[SIMPLE] > whole[MOD]
    assert best_type(found) == SIMPLE, "known to a user beforehand"
    assert whole[PEER_BEST] == pytest.approx((4 / 1 * 4 / 4) ** 0.5), (
        "the best of each prompt, known only afterwards"
    )
    next_to = figures(answer_pairs(llama_servers(times), "auto", SIMPLE))
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
