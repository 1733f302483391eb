"""A conversation: seeds, other answers, stopping, and dropping turns if the context is full."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from chat_models import TEMPLATE, last, say, session
from command import generate
from llamaspec import ModelOptions, Pair, PromptError, StopReason, chat_prompt, open_pair
from llamaspec.chat.conversation_files import ConversationFiles, load_conversation
from llamaspec.chat.messages import Message
from llamaspec.chat.session import REGENERATION
from llamaspec.chat.template import ChatTemplate, Rendered
from llamaspec.errors import ContextFullError, LlamaspecError


def test_each_turn_has_its_seed(pair: Pair) -> None:
    chat = session(pair, seed=40)
    seeds = []
    for text in ("one", "two"):
        say(chat, text)
        assert chat.last is not None
        seeds.append(chat.last.seed)
    assert seeds == [40, 41]
    chat.reset()
    say(chat, "one")
    assert [chat.last.seed if chat.last else None] == [40]


def test_the_first_answer_is_that_of_generate(pair: Pair, talker: list[Path]) -> None:
    chat = session(pair, seed=3, system="Be brief.")
    answer = say(chat, "hello")
    options = ["--chat", "--system", "Be brief.", "-t", "1", "--seed", "3", "-n", "20", "--n-ctx", "1024"]
    generated = generate("hello", *options, "--json", models=talker).json
    assert generated["text"] == answer
    assert generated["prompt_tokens"] == last(chat)[0]


def test_messages_of_programs_that_are_none(pair: Pair) -> None:
    for wrong in ({"role": "user"}, {"role": "nobody", "content": "x"}, {"role": "user", "content": 3}):
        with pytest.raises(PromptError):
            chat_prompt(pair, [wrong], template=TEMPLATE)


def test_regenerate(pair: Pair) -> None:
    remarks = list[str]()
    chat = session(pair, on_remark=remarks.append)
    with pytest.raises(PromptError, match="no answer to regenerate"):
        chat.regenerate()
    first = say(chat, "one")
    second = "".join(chat.regenerate())
    n_prompt, n_cached, _ = last(chat)
    assert n_cached == n_prompt - 1
    assert chat.last is not None
    assert chat.last.seed == 5 + REGENERATION
    assert second != first
    assert [message.text for message in chat.messages] == ["one", second]
    third = "".join(chat.regenerate())
    assert third not in (first, second)


def test_a_continued_answer_is_the_longer_answer(pair: Pair) -> None:
    """The parts of an answer are together the answer with a larger limit."""
    whole = session(pair, max_tokens=60)
    say(whole, "one")
    chat = session(pair)
    with pytest.raises(PromptError, match="no answer to continue"):
        chat.continue_answer()
    parts = say(chat, "one") + "".join(chat.continue_answer()) + "".join(chat.continue_answer())
    assert parts == whole.messages[-1].text
    assert chat.messages == whole.messages
    whole.settings = chat.settings
    assert say(chat, "two") == say(whole, "two")


def test_another_message_in_place_of_the_last(pair: Pair) -> None:
    chat, other = session(pair), session(pair)
    with pytest.raises(PromptError, match="there is no message yet"):
        _ = chat.last_message
    for message in ("one", "two"):
        say(chat, message)
    assert chat.last_message == "two"
    "".join(chat.ask_instead("three"))
    for message in ("one", "three"):
        say(other, message)
    assert chat.messages == other.messages


def test_stopping_keeps_the_text_so_far(pair: Pair) -> None:
    chat = session(pair)
    whole = say(session(pair), "one")
    with closing(chat.ask("one")) as pieces:
        said = next(pieces) + next(pieces)
    assert chat.messages == (Message("user", "one"), Message("assistant", said))
    assert whole.startswith(said)
    assert chat.last is not None
    assert chat.last.completion.stop_reason is StopReason.INTERRUPT
    say(chat, "two")
    assert last(chat)[1] >= last(chat)[0] - len("</s>[user]two</s>[assistant]")


def test_stopping_before_a_word_takes_the_message_back(pair: Pair) -> None:
    chat = session(pair)

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(chat.ask("one", interrupt))
    assert chat.messages == ()
    assert chat.last is None


class Spy(ChatTemplate):
    """Records the last prompt."""

    asked: tuple[str, ...] = ()

    def render(self, messages: Sequence[Message], *others: Any, **options: Any) -> Rendered:
        if messages[-1].role == "user":
            self.asked = tuple(message.text for message in messages)
        return super().render(messages, *others, **options)


def test_old_turns_are_left_out_when_the_context_is_full(talker: list[Path]) -> None:
    remarks = list[str]()
    template = Spy(TEMPLATE, "<s>", "</s>")
    with open_pair(talker[0], target_options=ModelOptions(n_ctx=256, threads=1)) as small:
        chat = session(small, system="Be brief.", on_remark=remarks.append, template=template)
        texts = [f"message {i}" for i in range(10)]
        n_drops = n_known = 0
        for text in texts:
            assert len(say(chat, text)) > 0
            assert template.asked[0] == "Be brief."
            assert template.asked[-1] == text
            n_prompt, n_cached, n_answer = last(chat)
            assert n_prompt + n_answer <= 256
            n_drops += n_cached < n_known - 1
            n_known = n_prompt
        assert len(chat.messages) == 1 + 2 * len(texts)  # nothing is lost for /save
        assert chat.last is not None
        assert chat.last.seed == 5 + 9
    # Room is made in large steps: only the turns after a drop prefill what was cached before.
    assert n_drops == len(remarks) == 2
    assert "outgrown the context of 256 tokens" in remarks[0]
    assert "but still the system prompt" in remarks[0]


def test_a_message_that_does_not_fit(talker: list[Path]) -> None:
    with open_pair(talker[0], target_options=ModelOptions(n_ctx=256, threads=1)) as small:
        chat = session(small)
        say(chat, "one")
        before = chat.messages
        with pytest.raises(ContextFullError, match=r"tokens .* but the context has 256; shorten it"):
            say(chat, "x" * 300)
        assert chat.messages == before
        say(chat, "x" * 200)  # fits alone
        assert len(chat.messages) == 4


def test_a_full_context_ends_the_answer(talker: list[Path]) -> None:
    with open_pair(talker[0], target_options=ModelOptions(n_ctx=128, threads=1)) as small:
        chat = session(small, max_tokens=1000)
        say(chat, "one")
        assert chat.last is not None
        assert chat.last.completion.stop_reason is StopReason.CONTEXT
        say(chat, "two")  # continues without the turn that filled the context
        assert last(chat)[0] < 128


# Files

HELLO = Message("user", "hello")


def test_fields_of_other_programs_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"role": "user", "content": "hello", "time": 3}]')
    assert load_conversation(tmp_path / "x.json") == (HELLO,)


def test_names_that_no_file_can_have() -> None:
    files = ConversationFiles()
    for name in ("a\0b", 300 * "a"):
        with pytest.raises(PromptError) as raised:
            files.load(name)
        assert "\0" not in str(raised.value)
        with pytest.raises(LlamaspecError):
            files.save(files.writable(name), [HELLO])
