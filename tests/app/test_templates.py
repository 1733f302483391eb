"""Chat templates: what they refuse, and how a conversation begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from chat_models import TEMPLATE, say, session, with_template
from command import invoke, naming
from llamaspec import ModelFileError, Pair, PromptError, open_pair
from llamaspec.llama.template import ChatTemplate
from llamaspec.values import Message
from model_store import ModelStore


def refusal(template: str, messages: list[Message]) -> str:
    with pytest.raises(PromptError) as caught:
        ChatTemplate(template, "<s>", "</s>").render(messages)
    assert "\n" not in str(caught.value)
    return str(caught.value)


HELLO = Message("user", "hello")
NO_SYSTEM = "{{ raise_exception('No system role') if messages[0].role == 'system' }}"


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (
            NO_SYSTEM,
            [Message("system", "x"), HELLO],
            "refuses: No system role; leave --system out",
        ),
        ("{{ raise_exception('Roles must\n alternate.') }}", [HELLO], "refuses: Roles must alternate; pass"),
        ("{{ messages[7].content.x }}", [HELLO], "refuses: "),
        ("{{ 1 + 'a' }}", [HELLO], "refuses: unsupported operand"),
        ("{% for %}", [HELLO], "the chat template is not valid: "),
    ],
)
def test_templates_that_refuse(template: str, messages: list[Message], says: str) -> None:
    assert says in refusal(template, messages)


def test_a_refused_message_leaves_no_trace(pair: Pair) -> None:
    chat = session(pair, template=ChatTemplate("{{ raise_exception('no') }}", "", ""))
    with pytest.raises(PromptError):
        say(chat, "one")
    assert chat.messages == ()


def test_a_model_without_a_template(talker: list[Path]) -> None:
    with open_pair(talker[1]) as plain, pytest.raises(ModelFileError, match=r"no chat template.*--target"):
        ChatTemplate.of(plain.target)
    for command in (["chat"], ["generate", "--chat", "hi"]):
        answer = invoke(*command, *naming(talker[1:]))
        assert answer.code == 1
        assert len(answer.complaints) == 1
        assert "--chat-template FILE" in answer.complaints[0]


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("{{ bos_token }}", "")])
def test_a_conversation_begins_once(pair: Pair, template: str) -> None:
    """Whether or not the template writes the token that begins a text."""
    text = ChatTemplate(template, "<s>", "</s>").render([HELLO]).encode()
    tokens = pair.target.vocabulary.tokenize_rendered(text).tolist()
    assert tokens.count(pair.target.vocabulary.bos) == 1
    assert tokens[0] == pair.target.vocabulary.bos


def test_the_copied_file_is_the_same_model(store: ModelStore, tmp_path: Path) -> None:
    plain = store.path("llama")
    with open_pair(plain) as a, open_pair(with_template(plain, tmp_path / "new.gguf", "x")) as b:
        assert b.target.metadata("tokenizer.chat_template") == "x"
        assert a.stream("the end", seed=1, max_tokens=8).run().tokens == (
            b.stream("the end", seed=1, max_tokens=8).run().tokens
        )
