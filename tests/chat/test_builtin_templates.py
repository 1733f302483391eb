"""Templates by name: llama.cpp's own write the same."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

from llamaspec.chat.builtin_templates import _TEMPLATES, builtin_template
from llamaspec.chat.messages import Message
from llamaspec.chat.template import ChatTemplate

from llama_cpp import llama_cpp as lib  # isort: skip  # after llamaspec, so that its kernels are on

TURNS = [("user", " Hi\n"), ("assistant", "Hello "), ("user", "By{{ e"), ("assistant", "x"), ("user", "y")]
CONVERSATIONS = [TURNS[:1], TURNS, [("system", 'You are \'"S"\\.'), *TURNS], [("system", "S"), *TURNS[2:3]]]


def names() -> list[str]:
    n = lib.llama_chat_builtin_templates(None, 0)
    found = (ctypes.c_char_p * n)()
    lib.llama_chat_builtin_templates(found, n)
    return [name.decode() for name in found if name is not None]


def written(name: str, turns: Sequence[tuple[str, str]]) -> str:
    """Return what llama.cpp writes."""
    spelled = [lib.llama_chat_message(role.encode(), text.encode()) for role, text in turns]
    messages, buffer = (lib.llama_chat_message * len(turns))(*spelled), ctypes.create_string_buffer(1 << 12)
    n = lib.llama_chat_apply_template(name.encode(), messages, len(turns), True, buffer, len(buffer))
    return buffer.raw[:n].decode()


def test_all_names_are_known() -> None:
    """Besides yandex, which drops the system prompt."""
    assert set(names()) - {"yandex"} == set(_TEMPLATES)
    assert builtin_template("yandex") is None


@pytest.mark.parametrize("turns", CONVERSATIONS, ids=len)
def test_templates_write_what_llama_cpp_writes(turns: list[tuple[str, str]]) -> None:
    for name in _TEMPLATES:
        source = builtin_template(name)
        assert source is not None
        messages = [Message(role, text) for role, text in turns]
        assert ChatTemplate(source, "", "").render(messages).text.decode() == written(name, turns), name
