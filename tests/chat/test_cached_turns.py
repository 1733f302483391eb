"""A conversation costs only its new tokens, and the KV cache does not change answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from chat_models import ASCII, ENDING, PLAIN, SENTENCEPIECE, TEMPLATE, last, say, session, write_chat_model
from llamaspec import ModelOptions, Pair, StopReason, open_pair
from llamaspec.chat.messages import Message
from llamaspec.chat.template import ChatTemplate, Rendered, SpecialTokens
from llamaspec.chat.transcript import Transcript
from llamaspec.llama.vocabulary import LlamaVocabulary
from model_store import ModelStore
from tiny_models import Recipe
from tiny_vocabulary import Vocabulary


def test_only_new_tokens_are_prefilled(pair: Pair) -> None:
    """Everything is cached but the last token of the answer, which was never evaluated."""
    chat = session(pair, system="Be brief.")
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
    path = write_chat_model(chat_folder / "ending.gguf", ENDING)
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


@pytest.mark.parametrize("vocabulary", [ASCII, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("template", [TEMPLATE, PLAIN], ids=["control tokens", "plain text"])
def test_the_model_s_own_tokens_are_kept(chat_folder: Path, vocabulary: Vocabulary, template: str) -> None:
    """A model may write "the" with other tokens than the tokenizer would."""
    path = chat_folder / f"{len(list(chat_folder.iterdir()))}.gguf"
    write_chat_model(path, Recipe(vocabulary=vocabulary), template)
    with open_pair(path, target_options=ModelOptions(threads=1)) as opened:
        words, render = opened.target.vocabulary, ChatTemplate.of(opened.target).render
        transcript = Transcript(words)
        talk = [Message("user", "the end")]
        first = transcript.read(render(talk)).tolist()
        assert first == fresh(words, render(talk))
        spelt = [token_of(letter, opened) for letter in (b"t", b"h", b"e")]
        transcript.wrote(spelt)
        talk += [Message("assistant", "the"), Message("user", "the end")]
        second = transcript.read(render(talk)).tolist()
        assert second[: len(first) + 3] == first + spelt
        canonical = fresh(words, render(talk))
        assert second != canonical
        assert b"".join(map(words.piece, second)) == b"".join(map(words.piece, canonical))
        assert transcript.read(render(talk)).tolist() == second  # nothing is new
        # Another text has its own tokens.
        other = render([Message("user", "he ended")])
        assert transcript.read(other).tolist() == fresh(words, other)


def fresh(words: LlamaVocabulary, rendered: Rendered) -> list[int]:
    """Return the tokens of a conversation without known text."""
    found: list[int] = words.begun(rendered.tokenize(words)).tolist()
    return found


MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def test_spaces_that_the_template_writes_itself(chat_folder: Path) -> None:
    """Such models begin their answers with a space; in the message, it would come twice."""
    path = write_chat_model(chat_folder / "spaces.gguf", Recipe(vocabulary=ASCII), MISTRAL)
    with open_pair(path, target_options=ModelOptions(threads=1)) as opened:
        chat = session(opened, max_tokens=4)
        for number in range(200):
            chat.reset()
            answer = say(chat, str(number))
            if answer[0] == " " and answer[1:] == answer.strip():
                break
        assert chat.messages[-1].text == answer[1:]
        n_prompt, _, n_answer = last(chat)
        say(chat, "and then?")
        assert last(chat)[1] == n_prompt + n_answer - 1


def token_of(text: bytes, pair: Pair) -> int:
    words = pair.target.vocabulary
    return next(token for token in range(words.size - 1, -1, -1) if words.piece(token) == text)


def test_half_a_character_is_tokenized_again(store: ModelStore) -> None:
    """Invalid UTF-8 is shown as U+FFFD, and the conversation continues with the text as shown."""
    with open_pair(store.path("llama"), target_options=ModelOptions(threads=1)) as opened:
        words = opened.target.vocabulary
        transcript = Transcript(words)
        transcript.read(Rendered(b"[user]a[assistant]", (), SpecialTokens(())))
        transcript.wrote([token_of(b"o", opened), token_of(b"\xef", opened), token_of(b"\xbc", opened)])
        text = "[user]a[assistant]o\ufffd[user]".encode()
        assert (
            b"".join(map(words.piece, transcript.read(Rendered(text, (), SpecialTokens(()))).tolist()))
            == text
        )
