"""The server, `llamaspec chat` and `chat_prompt` make one prompt of a conversation, and so one answer."""

from __future__ import annotations

from typing import Any

import pytest

from chat_models import last, say, session
from llamaspec import Pair, chat_prompt
from llamaspec.chat.messages import Message
from llamaspec.chat.template import ChatTemplate
from serve_soak import TEMPLATE as TOOLS_AND_REASONING
from serving import TEMPLATE, served

ROUNDS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<assistant>"
FAMILIES = {
    "no tools": TEMPLATE,
    "tools and reasoning": TOOLS_AND_REASONING,
    "reasoning begins": ROUNDS + "<think>\n{# </think> #}",
    "reasoning may begin": ROUNDS + "{# <think></think> #}",
    "channels": ROUNDS + "{# <|channel|><|message|><|start|> #}",
    "its own space": ROUNDS.replace(">{{ m.content", "> {{ m.content | trim"),
    "no system role": "{{ raise_exception('no system') if messages[0].role == 'system' }}" + ROUNDS,
}


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts of all completions during a test."""
    found: list[list[int]] = []
    stream = Pair.stream

    def noted(self: Pair, prompt: Any, **options: Any) -> Any:
        found.append(prompt.tolist())
        return stream(self, prompt, **options)

    monkeypatch.setattr(Pair, "stream", noted)
    return found


@pytest.mark.parametrize("source", FAMILIES.values(), ids=FAMILIES)
def test_one_prompt_and_one_answer(demo: Pair, prompts: list[list[int]], source: str) -> None:
    def programs(messages: tuple[Message, ...]) -> list[int]:
        tokens: list[int] = chat_prompt(demo, messages, template=source).tolist()
        return tokens

    chat = session(demo, system="Be brief.", template=ChatTemplate.of(demo.target, source))
    say(chat, "def f(x):")
    answer = say(chat, "and then?")
    *messages, _ = chat.messages
    asked = prompts[-1]
    chat.replace(chat.messages)
    list(chat.continue_answer())
    continued = prompts[-1]
    assert len(continued) == last(chat)[0]
    with served(demo, template=source) as server:
        talk = [{"role": each.role, "content": each.text} for each in messages]
        body = {"messages": talk, "temperature": 1.0, "seed": 6, "max_tokens": 20}
        told = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert told == answer
        assert asked == prompts[-1] == programs((*messages,))
        body["messages"] = [*talk, {"role": "assistant", "content": answer}]
        server.post("/v1/chat/completions", body)
        assert continued == prompts[-1] == programs((*messages, Message("assistant", answer)))
