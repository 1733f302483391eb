"""Conversations with models whose layers keep states: each turn processes only what is new.

A state cannot be cut, so it must have been kept where the next request branches. The conversations are
tokens, as chat templates write them: reasoning is off, sent back, or dropped from earlier answers. Messages
end with a token that ends answers, or only begin with a control token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from forward_requests import Count, text
from llamaspec import FixedLength, ModelOptions, Pair, open_pair
from llamaspec.llama.prefix_folder import PrefixFolder
from llamaspec.values import TokenArray
from model_store import ModelStore
from tiny_models import Recipe
from tiny_vocabulary import BYTES

RECIPE = Recipe(n_context=2048, vocabulary=BYTES.with_controls("<message>"))
OPTIONS = ModelOptions(n_ctx=2048, threads=1)
START, END = len(BYTES), BYTES.eos
SLACK = 64  # tokens that may be processed again
N_ANSWER, N_REASONING = 40, 25  # tokens
ASSISTANT, THINK, NO_THINK = text(3, 50), text(4, 51), text(6, 52)
PAIRS = [
    ("mamba", None), ("jamba", None), ("lfm2", None), ("nemotron_h", None), ("granitehybrid", None),
    ("qwen35", None), ("qwen35", "mtp"), ("qwen35moe", None), ("qwen35moe", "mtp"),
]  # fmt: skip
IDS = [kind if draft is None else f"{kind}-{draft}" for kind, draft in PAIRS]


def joined(*parts: TokenArray | Sequence[int]) -> TokenArray:
    return np.concatenate(parts).astype(np.int32)


@dataclass
class Chat:
    """A conversation, and how its template writes it."""

    pair: Pair
    evaluated: Count
    system: TokenArray
    thinking: str
    has_ends: bool  # of messages
    waits: bool = False  # prediction heads process no prompt before they are expected to win
    turns: list[tuple[TokenArray, TokenArray]] = field(default_factory=list)  # questions and answers

    def message(self, content: TokenArray) -> TokenArray:
        return joined(content, [END]) if self.has_ends else joined([START], content)

    def prompt(self, question: TokenArray) -> TokenArray:
        parts = [self.message(self.system)]
        for asked, answer in self.turns:
            parts += [self.message(asked), self.message(joined(ASSISTANT, self.sent_back(answer)))]
        parts += [self.message(question), joined([] if self.has_ends else [START], ASSISTANT)]
        return joined(*parts, NO_THINK if self.thinking == "off" else THINK)

    def sent_back(self, answer: TokenArray) -> TokenArray:
        kept = {"off": answer, "sent back": joined(THINK, answer), "dropped": answer[N_REASONING:]}
        return kept[self.thinking]

    def ask(self, n: int, seed: int, *, is_new: bool = False) -> int:
        """Ask a question of `n` tokens; return how many tokens of the prompt were processed needlessly.

        The last answer is new, too, because the template may write it in another way.
        """
        question = text(n, seed)
        prompt, n_last = self.prompt(question), len(self.turns[-1][1]) if self.turns else 0
        self.evaluated.taken()
        policy = None if self.waits else FixedLength(2 if self.pair.heads else 0)
        found = self.pair.stream(prompt, policy=policy, seed=seed, max_tokens=N_ANSWER).run()
        n_all = sum(len(each.tokens) for each in self.evaluated.segments if each.hidden is None)
        n_processed = n_all - sum(1 + len(round_.draft) for round_ in found.rounds)
        self.turns.append((question, joined(found.tokens)))
        return n_processed - (len(prompt) if is_new else n_last + n)


def chat(pair: Pair, evaluated: Count, kind: str, thinking: str = "dropped", n_system: int = 200) -> Chat:
    return Chat(pair, evaluated, text(n_system, 60), thinking, has_ends=kind != "nemotron_h")


@pytest.mark.parametrize(("kind", "draft"), PAIRS, ids=IDS)
@pytest.mark.parametrize("thinking", ["off", "sent back", "dropped"])
def test_a_turn_processes_the_last_answer_and_the_new_message(
    store: ModelStore, evaluated: Count, kind: str, draft: str | None, thinking: str
) -> None:
    with open_pair(store.path(kind, RECIPE), draft, target_options=OPTIONS) as pair:
        talk = chat(pair, evaluated, kind, thinking)
        assert talk.ask(150, 1, is_new=True) <= 0
        needless = [talk.ask(n, seed) for seed, n in enumerate((90, 20, 600), start=2)]
        assert max(needless) <= SLACK


@pytest.mark.parametrize("thinking", ["off", "sent back", "dropped"])
def test_heads_that_wait_want_no_cached_token_again(
    store: ModelStore, evaluated: Count, thinking: str
) -> None:
    """By default they wait; their rows of earlier turns would cost up to 512 tokens in each turn."""
    with open_pair(store.path("qwen35", RECIPE), "mtp", target_options=OPTIONS) as pair:
        talk = replace(chat(pair, evaluated, "qwen35", thinking), waits=True)
        needless = [talk.ask(n, seed) for seed, n in enumerate((150, 90, 20, 100))]
        assert max(needless[1:]) <= SLACK


@pytest.mark.parametrize(("kind", "draft"), PAIRS, ids=IDS)
def test_a_prefix_is_kept_wherever_a_conversation_goes_on(
    store: ModelStore, evaluated: Count, tmp_path: Path, kind: str, draft: str | None
) -> None:
    """After an edit, beside another conversation with the same system prompt, and after a restart.

    The system prompt is longer than the part of a prompt that is processed at once.
    """
    folder, path = PrefixFolder(tmp_path / "saved", 1 << 30), store.path(kind, RECIPE)
    with open_pair(path, draft, target_options=OPTIONS) as pair:
        first, second = (chat(pair, evaluated, kind, n_system=700) for _ in range(2))
        first.ask(150, 1)
        needless = {"another conversation": second.ask(150, 2)}
        for seed in (3, 4):
            needless[f"one of two clients, {seed}"] = first.ask(90, seed)
            needless[f"the other, {seed}"] = second.ask(90, seed + 10)
        edited = replace(first, turns=first.turns[:1])
        needless["an edit"] = edited.ask(100, 5)
        folder.save(pair.caches, pytest.fail)
    with open_pair(path, draft, target_options=OPTIONS) as pair:
        folder.load(pair.caches, lambda _: None)
        first.pair = second.pair = pair
        needless["a restart"] = first.ask(90, 6)
        needless["a restart, the other"] = second.ask(90, 7)
        third = chat(pair, evaluated, kind, n_system=700)
        needless["a new conversation after a restart"] = third.ask(90, 8)
    assert max(needless.values()) <= SLACK, needless
