"""Which family a chat template belongs to, and which control tokens its answers need."""

from __future__ import annotations

import pytest

from llamaspec.chat import families
from llamaspec.chat.families import recognize
from llamaspec.chat.parse import AnswerFormat, CallFormat

THINKS = "{{- '<think>\\n\\n</think>\\n\\n' }}"
# The lines of published templates that tell.
TEMPLATES = {
    "Qwen3": (
        "<tool_call>\\n{\\\"name\\\": <function-name>, \\\"arguments\\\": <args-json-object>}\\n</tool_call>"
        + THINKS,
        families.HERMES,
        "<think>",
    ),
    "Hermes": (
        "{{- '<tool_call>\\n{\"name\": \"' }}{{ '\", \"arguments\": ' }}</tool_call>",
        families.HERMES,
        None,
    ),
    "Qwen3-Coder": (
        "'\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' '<parameter=' + args_name '</tool_call>'",
        families.QWEN_XML,
        None,
    ),
    "Llama 3.1": (
        "'<|start_header_id|>assistant<|end_header_id|>' {{- '\"parameters\": ' }}",
        families.LLAMA3,
        None,
    ),
    "Nemo": ('{{- "[TOOL_CALLS][" }}', families.MISTRAL, None),
    "Ministral": (
        "'[TOOL_CALLS]' name + '[ARGS]' + arguments '[THINK]' '[/THINK]'",
        families.MISTRAL_ARGS,
        "[THINK]",
    ),
    "Gemma 4": (
        "'<|tool_call>call:' + name '}<tool_call|>' '<|channel>thought\\n<channel|>'",
        families.GEMMA4,
        "<|channel>thought\n",
    ),
    "gpt-oss": (
        '"<|start|>assistant<|channel|>analysis<|message|>" "<|end|>"',
        families.HARMONY,
        "<|channel|>analysis<|message|>",
    ),
    "DeepSeek R1": ("content.split('</think>')[-1]", None, "<think>"),
    "Gemma 2": ("<start_of_turn>", None, None),
    "Apriel, a list": ('<tool_call></tool_call> <tool_calls>[{"arguments": 1}]</tool_calls>', None, None),
    "Llama 3, without tools": ("<|start_header_id|>", None, None),
}  # fmt: skip


@pytest.mark.parametrize(("source", "calls", "opening"), TEMPLATES.values(), ids=TEMPLATES)
def test_families(source: str, calls: CallFormat | None, opening: str | None) -> None:
    found = recognize(source)
    assert found.calls is calls
    assert (found.reasoning.opening if found.reasoning else None) == opening


def test_the_tokens_of_an_answer() -> None:
    """Marks are spelled, the tokens of turns never."""
    controls = {
        "<|channel|>": 1,
        "<|message|>": 2,
        "<|start|>": 3,
        "<|end|>": 4,
        "<|im_start|>": 5,
        "<s>": 6,
        "": 7,
    }
    harmony = recognize(TEMPLATES["gpt-oss"][0]).spelled(controls)
    assert harmony == {1: b"<|channel|>", 2: b"<|message|>", 3: b"<|start|>", 4: b"<|end|>"}
    assert recognize("").spelled(controls) == {}
    gemma = recognize(TEMPLATES["Gemma 4"][0])
    assert gemma.spelled({"<|channel>": 1, "<channel|>": 2, "<eos>": 3}) == {
        1: b"<|channel>",
        2: b"<channel|>",
    }


@pytest.mark.parametrize(
    ("prompt", "thinks"),
    [
        (b"<|im_start|>assistant\n<think>\n", True),
        (b"<|im_start|>assistant\n<think>", True),
        (b"<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        (b"<|im_start|>assistant\n", False),
    ],
)
def test_whether_the_prompt_opens_the_reasoning(prompt: bytes, thinks: bool) -> None:
    assert recognize(THINKS).begins_thinking(prompt) is thinks
    assert not recognize(TEMPLATES["gpt-oss"][0]).begins_thinking(prompt)
    assert not AnswerFormat().begins_thinking(prompt)
