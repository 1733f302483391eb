"""Chat templates by name, as `--chat-template` of llama.cpp knows them.

Each is a table of what stands around the messages of a role, from which a Jinja template is made.
tests/chat/test_builtin_templates.py compares all of them with llama.cpp's own.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

FALLBACK = "chatml"  # for models that have no template
Around = tuple[str, str]  # before and after a message


class _Turns(NamedTuple):
    """How a model was trained to read a conversation."""

    system: Around
    user: Around
    assistant: Around
    answer: str = ""  # before the answer
    strip: str = ""  # initials of the roles whose messages lose spaces at both ends
    begin: str = ""
    no_system: str = ""  # at the begin of a conversation without a system message
    joins: bool = False  # the first user message continues the system message, without what is before it

    def source(self) -> str:
        """Return the Jinja template."""
        parts = [_text(self.begin)]
        if self.no_system:
            parts.append(
                "{% if not messages or messages[0]['role'] != 'system' %}"
                + _text(self.no_system)
                + "{% endif %}"
            )
        parts.append("{% for message in messages %}")
        after_system = "{% if loop.first or messages[loop.index0 - 1]['role'] != 'system' %}"
        for word, role in (("if", "system"), ("elif", "user"), ("else", "assistant")):
            before, after = getattr(self, role)
            condition = "" if word == "else" else f" message['role'] == '{role}'"
            begin = _text(before)
            if self.joins and role == "user":
                begin = f"{after_system}{begin}{{% endif %}}"
            trim = " | trim" if role[0] in self.strip else ""
            parts.append(f"{{% {word}{condition} %}}{begin}{{{{ message['content']{trim} }}}}{_text(after)}")
        return "".join([*parts, "{% endif %}{% endfor %}", _text(self.answer)])


def _text(text: str) -> str:
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def _alike(form: str, answer: str | None = None, strip: str = "", **more: Any) -> _Turns:
    """Return turns that differ only in the name of the role: `form` has ROLE and TEXT."""
    around = [
        form.replace("ROLE", more.pop(role, role)).split("TEXT") for role in ("system", "user", "assistant")
    ]
    system, user, assistant = ((before, after) for before, after in around)
    return _Turns(system, user, assistant, assistant[0] if answer is None else answer, strip, **more)


_SU, _ALL = "su", "sua"
_GRANITE = _alike("<|start_of_role|>ROLE<|end_of_role|>TEXT<|end_of_text|>\n")
_EXAONE = _Turns(
    ("[|system|]", "[|endofturn|]\n"),
    ("[|user|]", "\n"),
    ("[|assistant|]", "[|endofturn|]\n"),
    "[|assistant|]",
    _ALL,
)
_BAILING = {"system": "SYSTEM", "user": "HUMAN", "assistant": "ASSISTANT"}
_TEMPLATES = {
    "bailing": _alike("<role>ROLE</role>TEXT", **_BAILING),
    "bailing-think": _alike("<role>ROLE</role>TEXT", "<role>ASSISTANT</role><think>", **_BAILING),
    "bailing2": _alike(
        "<role>ROLE</role>TEXT<|role_end|>", **_BAILING,
        no_system="<role>SYSTEM</role>detailed thinking off<|role_end|>",
    ),
    "chatglm3": _alike("<|ROLE|>\n TEXT", "<|assistant|>", begin="[gMASK]sop"),
    "chatglm4": _alike("<|ROLE|>\nTEXT", begin="[gMASK]<sop>"),
    "chatml": _alike("<|im_start|>ROLE\nTEXT<|im_end|>\n"),
    "command-r": _alike(
        "<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>TEXT<|END_OF_TURN_TOKEN|>", strip=_ALL,
        system="SYSTEM", user="USER", assistant="CHATBOT",
    ),
    "deepseek": _Turns(
        ("", ""), ("### Instruction:\n", "\n"), ("### Response:\n", "\n<|EOT|>\n"), "### Response:\n"
    ),
    "deepseek-ocr": _Turns(("", ""), ("", ""), ("", "")),
    "deepseek2": _Turns(
        ("", "\n\n"), ("User: ", "\n\n"), ("Assistant: ", "<｜end▁of▁sentence｜>"), "Assistant:"
    ),
    "deepseek3": _Turns(
        ("", "\n\n"), ("<｜User｜>", ""), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"), "<｜Assistant｜>"
    ),
    "exaone-moe": _alike("<|ROLE|>\nTEXT<|endofturn|>\n", strip=_ALL),
    "exaone3": _EXAONE,
    "exaone4": _EXAONE,
    "falcon3": _alike("<|ROLE|>\nTEXT\n"),
    "gemma": _Turns(
        ("<start_of_turn>user\n", "\n\n"), ("<start_of_turn>user\n", "<end_of_turn>\n"),
        ("<start_of_turn>model\n", "<end_of_turn>\n"), "<start_of_turn>model\n", _ALL, joins=True,
    ),
    "gigachat": _Turns(
        ("", "<|message_sep|>"),
        ("user<|role_sep|>", "<|message_sep|>available functions<|role_sep|>[]<|message_sep|>"),
        ("assistant<|role_sep|>", "<|message_sep|>"), "assistant<|role_sep|>", begin="<s>",
    ),
    "glmedge": _alike("<|ROLE|>\nTEXT", "<|assistant|>"),
    "gpt-oss": _Turns(
        ("<|start|>system<|message|>", "<|end|>"), ("<|start|>user<|message|>", "<|end|>"),
        ("<|start|>assistant<|message|>", "<|return|>"), "<|start|>assistant",
    ),
    "granite": _GRANITE,
    "granite-4.0": _GRANITE,
    "granite-4.1": _GRANITE,
    "grok-2": _alike(
        "ROLE: TEXT<|separator|>\n\n", "Assistant:", _SU, system="System", user="Human", assistant="Assistant"
    ),
    "hunyuan-dense": _Turns(
        ("", "<｜hy_place▁holder▁no▁3｜>"), ("<｜hy_User｜>", "<｜hy_Assistant｜>"),
        ("<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁2｜>"),
    ),
    "hunyuan-moe": _Turns(
        ("<|startoftext|>", "<|extra_4|>"), ("<|startoftext|>", "<|extra_0|>"), ("", "<|eos|>")
    ),
    "hunyuan-vl": _Turns(
        ("", "<｜hy_place▁holder▁no▁3｜>"), ("", "<｜hy_User｜>"), ("", "<｜hy_Assistant｜>"),
        begin="<｜hy_begin▁of▁sentence｜>",
    ),
    "kimi-k2": _alike("<|im_ROLE|>ROLE<|im_middle|>TEXT<|im_end|>"),
    "llama2": _Turns(("[INST] ", "\n"), ("[INST] ", " [/INST]"), ("", "</s>"), joins=True),
    "llama2-sys": _Turns(
        ("[INST] <<SYS>>\n", "\n<</SYS>>\n\n"), ("[INST] ", " [/INST]"), ("", "</s>"), joins=True
    ),
    "llama2-sys-bos": _Turns(
        ("[INST] <<SYS>>\n", "\n<</SYS>>\n\n"), ("[INST] ", " [/INST]"), ("", "</s><s>"), joins=True
    ),
    "llama2-sys-strip": _Turns(
        ("[INST] <<SYS>>\n", "\n<</SYS>>\n\n"), ("[INST] ", " [/INST]"), ("", "</s>"), strip=_ALL, joins=True
    ),
    "llama3": _alike("<|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>", strip=_ALL),
    "llama4": _alike("<|header_start|>ROLE<|header_end|>\n\nTEXT<|eot|>", strip=_ALL),
    "megrez": _alike("<|role_start|>ROLE<|role_end|>TEXT<|turn_end|>"),
    "minicpm": _Turns(("", ""), ("<用户>", "<AI>"), ("", ""), strip=_ALL),
    "mistral-v1": _Turns((" [INST] ", "\n\n"), (" [INST] ", " [/INST]"), (" ", "</s>"), joins=True),
    "mistral-v3": _Turns(("[INST] ", "\n\n"), ("[INST] ", "[/INST]"), (" ", "</s>"), strip="a", joins=True),
    "mistral-v3-tekken": _Turns(("[INST]", "\n\n"), ("[INST]", "[/INST]"), ("", "</s>"), joins=True),
    "mistral-v7": _Turns(("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"), ("[INST] ", "[/INST]"), (" ", "</s>")),
    "mistral-v7-tekken": _Turns(("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), ("[INST]", "[/INST]"), ("", "</s>")),
    "monarch": _alike("ROLE\nTEXT</s>\n<s>"),
    "openchat": _Turns(
        ("", "<|end_of_turn|>"), ("GPT4 Correct User: ", "<|end_of_turn|>"),
        ("GPT4 Correct Assistant: ", "<|end_of_turn|>"), "GPT4 Correct Assistant:",
    ),
    "orion": _Turns(("Human: ", "\n\n"), ("Human: ", "\n\nAssistant: </s>"), ("", "</s>"), joins=True),
    "pangu-embedded": _alike(
        "[unused9]ROLE：TEXT[unused10]", system="系统", user="用户", assistant="助手",
        no_system="[unused9]系统：[unused10]",
    ),
    "phi3": _alike("<|ROLE|>\nTEXT<|end|>\n"),
    "phi4": _alike("<|im_start|>ROLE<|im_sep|>TEXT<|im_end|>"),
    "rwkv-world": _alike(
        "ROLE: TEXT\n\n", "Assistant:", _ALL, system="System", user="User", assistant="Assistant"
    ),
    "seed_oss": _alike("<seed:bos>ROLE\nTEXT<seed:eos>", strip="a"),
    "smolvlm": _Turns(
        ("", "\n\n"), ("User: ", "<end_of_utterance>\n"), ("Assistant: ", "<end_of_utterance>\n"),
        "Assistant:", begin="<|im_start|>",
    ),
    "solar-open": _alike("<|begin|>ROLE<|content|>TEXT<|end|>", "<|begin|>assistant"),
    "vicuna": _Turns(("", "\n\n"), ("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), "ASSISTANT:"),
    "vicuna-orca": _Turns(("SYSTEM: ", "\n"), ("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), "ASSISTANT:"),
    "zephyr": _alike("<|ROLE|>\nTEXT<|endoftext|>\n"),
}  # fmt: skip


def builtin_template(name: str) -> str | None:
    """Return the source of llama.cpp's template of this name; None if there is none."""
    turns = _TEMPLATES.get(name)
    return None if turns is None else turns.source()
