"""Reasoning: shown separately, left out of later prompts, and ended at its budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_models import PLAIN, TEMPLATE, last, say, session
from command import invoke, naming
from llamaspec import EvaluationError, FixedLength, ModelOptions, Pair, Sampling, StopReason, open_pair
from llamaspec.chat.answer_stream import AnswerStream
from llamaspec.chat.messages import Delta, Message, message_of
from llamaspec.chat.notation import AnswerFormat, Reasoning
from llamaspec.chat.parse import AnswerParser
from llamaspec.chat.template import ChatTemplate
from llamaspec.engine.stream import TextStream
from llamaspec.protocols import LengthPolicy
from llamaspec.values import TokenArray

REASONING = Reasoning("<think>", "</think>", "\n\n")
THINKS = AnswerFormat(None, REASONING)
# Leaves out the reasoning of earlier turns, and opens that of the next unless a variable disables it.
THINKING = TEMPLATE + "{{ '<think>\n' if enable_thinking is not defined else '<think></think>' }}"
SEED = 9


def answer(
    pair: Pair, budget: int | None, max_tokens: int = 30, policy: LengthPolicy | None = None
) -> AnswerStream:
    prompt = pair.target.vocabulary.tokenize(b"Why?<think>\n")

    def open_stream(prompt: TokenArray, n: int) -> TextStream:
        return pair.stream(prompt, seed=SEED, max_tokens=n, sampling=Sampling(temperature=1.0), policy=policy)

    parser = AnswerParser(THINKS, thinking=True)
    return AnswerStream(prompt, max_tokens, open_stream, parser, pair.target.vocabulary, budget)


def whole(steps: list[list[Delta]]) -> Message:
    return message_of(delta for deltas in steps for delta in deltas)


def test_without_a_budget_reasoning_is_not_ended(pair: Pair) -> None:
    stream = answer(pair, None)
    found = whole(list(stream))
    assert found.text == ""
    assert found.reasoning is not None
    assert stream.completion.text.strip() == found.reasoning
    assert len(stream.completion.tokens) == 30


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_ends_at_its_budget(pair: Pair, budget: int) -> None:
    """The answer continues after the prompt, the reasoning and the closing mark."""
    words = pair.target.vocabulary
    stream = answer(pair, budget)
    steps = list(stream)
    done = stream.completion
    cut = words.tokenize(REASONING.cut.encode(), add_special=False).tolist()
    assert done.tokens[budget : budget + len(cut)] == tuple(cut)
    assert len(done.tokens) == 30
    assert done.stop_reason is StopReason.LIMIT
    assert len(steps) == 30 - len(cut) + 2  # one for each token, the cut and the end
    prompt = words.tokenize(b"Why?<think>\n")
    assert done.n_prompt_tokens == len(prompt)
    thoughts = answer(pair, None)
    assert list(thoughts)
    assert done.tokens[:budget] == thoughts.completion.tokens[:budget]
    read = np.array([*prompt, *done.tokens[: budget + len(cut)]], dtype=np.int32)
    n_left = 30 - budget - len(cut)
    rest = pair.stream(read, seed=SEED, max_tokens=n_left, sampling=Sampling(temperature=1.0)).run()
    assert done.tokens[budget + len(cut) :] == rest.tokens
    assert whole(steps).text == rest.text.lstrip("\n")
    assert done.summary.n_tokens == budget + n_left


def test_a_draft_that_fails_during_reasoning(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model drafts for the answer again, and the fault is still reported."""
    assert pair.draft is not None
    right, faults = answer(pair, 7), [EvaluationError("llama.cpp failed")]
    said, evaluate = whole(list(right)), pair.draft.evaluate

    def fails_once(*batch: Any) -> Any:
        if faults:
            raise faults.pop()
        return evaluate(*batch)

    monkeypatch.setattr(pair.draft, "evaluate", fails_once)
    pair.forget()
    stream = answer(pair, 7, policy=FixedLength(2))
    assert whole(list(stream)) == said
    assert stream.completion.draft_fault == "llama.cpp failed"
    assert stream.completion.summary.n_drafted > 0
    assert right.completion.draft_fault is None


def test_no_room_to_end_the_reasoning(pair: Pair) -> None:
    """Without tokens or context left, the reasoning is the whole answer."""
    stream = answer(pair, 25)
    assert whole(list(stream)).text == ""
    assert len(stream.completion.tokens) == 30


def test_the_context_is_full(talker: list[Path]) -> None:
    with open_pair(talker[0], target_options=ModelOptions(n_ctx=64, threads=1)) as small:
        stream = answer(small, 45, max_tokens=1000)
        assert whole(list(stream)).text == ""
        assert stream.completion.stop_reason is StopReason.CONTEXT


def test_closed(pair: Pair) -> None:
    stream, parts = answer(pair, 3), []
    for part in stream:
        parts.append(part)
        if len(parts) == 2:
            stream.close()
    assert len(parts) == 2


def test_a_conversation(pair: Pair) -> None:
    """The user sees the answer and, separately, the reasoning; the next prompt leaves it out."""
    thoughts = list[str]()
    template = ChatTemplate(THINKING, "<s>", "</s>")
    chat = session(pair, template=template, on_reasoning=thoughts.append, reasoning_budget=5)
    said = say(chat, "one")
    assert said
    assert thoughts
    assert chat.messages == (Message("user", "one"), Message("assistant", said))
    n_first = last(chat)[0]
    say(chat, "two")
    n_prompt, n_cached, _ = last(chat)
    assert n_cached >= n_first - len("<think>\n") - 1  # up to the place of the reasoning
    fresh = template.render(chat.messages[:3]).text
    assert n_prompt == len(pair.target.vocabulary.tokenize(fresh[len("<s>") :], parse_special=True))


def test_through_the_entry_point(talker: list[Path], tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(
        PLAIN + "{{ '<think>' if enable_thinking is not defined }}{# </think> #}"
    )
    options = ["chat", *naming(talker), "--n-ctx", "1024", "--seed", "5", "-n", "40", "-t", "1", "-k", "2"]
    options += ["--chat-template", str(tmp_path / "t.jinja")]
    shown = invoke(*options, "--reasoning-budget", "4", stdin=b"one\n")
    hidden = invoke(*options, "--reasoning-budget", "4", "--reasoning", "hide", stdin=b"one\n")
    off = invoke(*options, "--reasoning", "off", stdin=b"one\n")
    endless = invoke(*options, stdin=b"one\n")
    assert shown.stdout == hidden.stdout != off.stdout
    assert len(shown.stderr) > len(hidden.stderr)
    assert endless.stdout == "\n"
    assert len(off.stdout) > 20
    assert invoke(*options, "--reasoning-budget", "-1", stdin=b"").code == 2
    # A model whose reasoning is disabled must not write any.
    (tmp_path / "t.jinja").write_text(PLAIN + "<think>{# </think> #}")
    forbidden, none, one = (
        invoke(*options, *more, stdin=b"one\n").stdout
        for more in (["--reasoning", "off"], ["--reasoning-budget", "0"], ["--reasoning-budget", "1"])
    )
    assert forbidden == none != one
