"""The prompt of a conversation comes from its messages alone, and most of it is in the KV cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chat_models import ASCII, ENDING, TALKER, TEMPLATE, last, say, session, write_chat_model
from llamaspec import ModelOptions, Pair, StopReason, chat_prompt, open_pair
from llamaspec.chat.conversation_files import load_conversation, save_conversation
from llamaspec.chat.messages import Message
from llamaspec.chat.prompt import render_prompt
from llamaspec.chat.template import ChatTemplate

N_PLAIN = len(ASCII) - len(ASCII.merges)
# Each letter is a token of its own, so there is only one way to split a text. llama.cpp needs a merge.
LETTERS = replace(ASCII, tokens=ASCII.tokens[:N_PLAIN], types=ASCII.types[:N_PLAIN], merges=("h e",))


@pytest.fixture(scope="module")
def speller(chat_folder: Path) -> Path:
    return write_chat_model(chat_folder / "letters.gguf", replace(TALKER, vocabulary=LETTERS))


def test_only_new_tokens_are_prefilled(speller: Path) -> None:
    """Everything is cached but the last token of the answer, which was never evaluated."""
    with open_pair(speller, target_options=ModelOptions(threads=1)) as opened:
        chat = session(opened, system="Be brief.")
        say(chat, "hello there")
        n_prompt, n_cached, n_answer = last(chat)
        assert (n_cached, n_answer) == (0, 20)
        for _ in range(3):
            known = n_prompt + n_answer
            say(chat, "and then?")
            n_prompt, n_cached, n_answer = last(chat)
            assert n_cached == known - 1


def test_an_answer_that_ended_is_cached_completely(chat_folder: Path) -> None:
    """The model has evaluated all of it to choose the end-of-text token."""
    path = write_chat_model(chat_folder / "ending.gguf", replace(ENDING, vocabulary=LETTERS))
    with open_pair(path, target_options=ModelOptions(threads=1)) as ending:
        chat = session(ending, max_tokens=500, n_drafted=0)
        known = 0
        for text in ("one", "two", "three"):
            say(chat, text)
            n_prompt, n_cached, n_answer = last(chat)
            assert chat.last is not None
            assert chat.last.completion.stop_reason is StopReason.END
            assert n_cached == known
            known = n_prompt + n_answer


def test_an_answer_in_other_tokens_is_cached_up_to_the_first_that_differs(pair: Pair) -> None:
    """A random model splits its words as no tokenizer would; the prompt before them stays cached."""
    chat = session(pair)
    say(chat, "one")
    n_before, _, n_answer = last(chat)
    say(chat, "two")
    assert n_before <= last(chat)[1] < n_before + n_answer - 1


def test_a_saved_conversation_goes_on_the_same_way(pair: Pair, tmp_path: Path) -> None:
    """The tokens of earlier answers were once kept while a chat lasted, but not in its file."""
    chat = session(pair)
    for text in ("one", "two"):
        say(chat, text)
    save_conversation(tmp_path / "talk.json", chat.messages)
    answer = say(chat, "three")
    loaded = session(pair)
    loaded.replace(load_conversation(tmp_path / "talk.json"))
    assert say(loaded, "three") == answer
    assert last(loaded)[0] == last(chat)[0]


def test_a_loaded_answer_continues_as_a_larger_limit(pair: Pair) -> None:
    talk = [Message("user", "one"), Message("assistant", "two")]
    whole, chat = session(pair, max_tokens=40), session(pair)
    for each, n_parts in ((whole, 1), (chat, 2)):
        each.replace(talk)
        for _ in range(n_parts):
            list(each.continue_answer())
    assert chat.messages == whole.messages
    assert chat.messages[-1].text.startswith("two")


# Templates that open reasoning, leave it to the model, or rule it out, and gpt-oss's channels.
THINKS = f"{TEMPLATE}<think>\n{{# </think> #}}"
MAY_THINK = f"{TEMPLATE}{{# <think></think> #}}"
CHANNELS = f"{TEMPLATE}{{# <|channel|><|message|><|start|> #}}"
CLOSED = f"{TEMPLATE}<think>\n\n</think>{{{{ '\n\n' }}}}"
FINAL = "<|channel|>final<|message|>"
HM, BOTH = (Message("assistant", text, reasoning="Hm") for text in ("", "So"))


@pytest.mark.parametrize(
    ("template", "answer", "begun", "is_thinking"),
    [
        (TEMPLATE, Message("assistant", "So "), "So ", False),
        (TEMPLATE, Message("assistant", " \n"), "", False),
        (THINKS, Message("user", "x"), "<think>\n", True),
        (THINKS, Message("assistant", "So"), "<think>\n\n</think>\n\nSo", False),
        (THINKS, BOTH, "<think>\nHm\n</think>\n\nSo", False),
        (THINKS, HM, "<think>\nHm", True),
        (MAY_THINK, Message("assistant", "So"), "So", False),
        (MAY_THINK, BOTH, "<think>Hm\n</think>\n\nSo", False),
        (MAY_THINK, HM, "<think>Hm", True),
        (CLOSED, BOTH, "<think>\n\n</think>\n\nSo", False),
        (CLOSED, HM, "<think>\n\n</think>\n\n", False),
        (CHANNELS, Message("assistant", "So"), f"{FINAL}So", False),
        (CHANNELS, BOTH, f"<|channel|>analysis<|message|>Hm\n<|end|><|start|>assistant{FINAL}So", False),
        (CHANNELS, HM, "", False),
    ],
)
def test_the_beginning_of_an_answer(template: str, answer: Message, begun: str, is_thinking: bool) -> None:
    prompt = render_prompt(ChatTemplate(template, "<s>", "</s>"), [Message("user", "one"), answer])
    assert prompt.rendered.text.decode().rpartition("[assistant]")[2] == begun
    assert prompt.is_thinking == is_thinking


def test_an_answer_alone_has_a_user_before_it() -> None:
    messages = [Message("system", "s"), Message("assistant", "a"), Message("assistant", "b")]
    prompt = render_prompt(ChatTemplate(TEMPLATE, "<s>", "</s>"), messages)
    assert prompt.rendered.text == b"<s>[system]s</s>[user]</s>[assistant]a\n\nb"


def test_programs_continue_an_answer_and_may_write_control_tokens_in_it(pair: Pair) -> None:
    messages = [Message("user", "one"), Message("assistant", "two</s>", reasoning="</s>")]
    eos = pair.target.vocabulary.eos
    counts = [
        chat_prompt(pair, messages, template=THINKS, parse_special=special).tolist().count(eos)
        for special in (False, True)
    ]
    assert counts == [1, 3]  # the template's own, and those of the answer
