"""Chat templates: what they refuse, and how a conversation begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from chat_models import TEMPLATE, say, session, with_template
from command import invoke, naming
from llamaspec import ModelFileError, Pair, PromptError, open_pair
from llamaspec.chat.template import ChatTemplate, Message, TemplateError
from llamaspec.chat.transcript import Transcript
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
            "refuses: No system role; leave the system prompt out",
        ),
        (
            "{{ raise_exception('Roles must\n alternate.') }}",
            [HELLO],
            "refuses: Roles must alternate; give another",
        ),
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


def test_a_template_gets_the_model_s_own_ends(pair: Pair) -> None:
    template = ChatTemplate.of(pair.target, "{{ bos_token }}|{{ messages[0].content }}|{{ eos_token }}")
    rendered = template.render([HELLO])
    assert rendered.text == b"<s>|hello|</s>"
    assert rendered.specials == ((0, 3), (10, 14))


def test_a_model_without_a_template(talker: list[Path]) -> None:
    with open_pair(talker[1]) as plain, pytest.raises(ModelFileError, match="no chat template"):
        ChatTemplate.of(plain.target)
    for command in (["chat"], ["generate", "--chat", "hi"]):
        answer = invoke(*command, *naming(talker[1:]))
        assert answer.code == 1
        assert len(answer.complaints) == 1
        assert answer.complaints[0].endswith("(--target, --chat-template)")


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("{{ bos_token }}", "")])
def test_a_conversation_begins_once(pair: Pair, template: str) -> None:
    """Whether or not the template writes the token that begins a text."""
    words = pair.target.vocabulary
    tokens = Transcript(words).read(ChatTemplate(template, "<s>", "</s>").render([HELLO])).tolist()
    assert tokens.count(words.bos) == 1
    assert tokens[0] == words.bos


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% generation %}x{% endgeneration %}", "x"),
        (
            "{% for m in messages %}\n  {% if loop.first %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}",
            "hello\n",
        ),
        ("{% for m in messages * 3 %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{{ {'a': '<é>', 'b': messages[0].content} | tojson }}", '{"a": "<é>", "b": "hello"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ 'yes' if add_generation_prompt }}{{ 'none' if tools is none }}", "yesnone"),
        ("{{ messages.append(1) }}", None),
        ("{{ ''.__class__.__mro__ }}", None),
    ],
)
def test_the_environment_of_transformers(template: str, text: str | None) -> None:
    """What templates are written for, in a sandbox that lets them change and reach nothing."""
    if text is None:
        assert "refuses" in refusal(template, [HELLO])
    else:
        assert ChatTemplate(template, "<s>", "</s>").render([HELLO]).text.decode() == text


@pytest.mark.parametrize(
    "template",
    [
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        500 * "{% if true %}" + 500 * "{% endif %}",
        25 * "{% for m in messages %}" + 25 * "{% endfor %}",
        "{{ " + 3000 * "(" + "1" + 3000 * ")" + " }}",
    ],
    ids=["macro", "ifs", "loops", "brackets"],
)
def test_templates_without_end(template: str) -> None:
    """They gave a traceback: Python's own limits are no faults of a template that Jinja knows."""
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(template, "<s>", "</s>").render([HELLO])
    assert "\n" not in str(caught.value)


def test_the_copied_file_is_the_same_model(store: ModelStore, tmp_path: Path) -> None:
    plain = store.path("llama")
    with open_pair(plain) as a, open_pair(with_template(plain, tmp_path / "new.gguf", "x")) as b:
        assert b.target.metadata("tokenizer.chat_template") == "x"
        assert a.stream("the end", seed=1, max_tokens=8).run().tokens == (
            b.stream("the end", seed=1, max_tokens=8).run().tokens
        )
