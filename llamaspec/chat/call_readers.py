"""How each family's calls of tools are read from an answer; formats in `chat/formats.py`.

A reader passes content on until a call begins, then the call's name and arguments as they come. Arguments
arrive as JSON: where a family writes them otherwise, they are translated on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llamaspec.chat.answer_text import Reading
from llamaspec.chat.formats import CallFormat
from llamaspec.chat.gemma_calls import read_gemma4
from llamaspec.chat.json_calls import read_deepseek, read_hermes, read_kimi, read_llama3, read_mistral
from llamaspec.chat.reading_calls import Receiver
from llamaspec.chat.tagged_calls import read_glm, read_qwen_xml

READERS: Mapping[CallFormat, Callable[[Receiver], Reading[None]]] = {
    CallFormat.HERMES: read_hermes,
    CallFormat.QWEN_XML: read_qwen_xml,
    CallFormat.LLAMA3: read_llama3,
    CallFormat.MISTRAL: read_mistral,
    CallFormat.MISTRAL_ARGS: read_mistral,
    CallFormat.GEMMA4: read_gemma4,
    CallFormat.DEEPSEEK: read_deepseek,
    CallFormat.DEEPSEEK_R1: read_deepseek,
    CallFormat.GLM: read_glm,
    CallFormat.KIMI: read_kimi,
}
