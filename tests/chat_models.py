"""Tiny models with a chat template, and how tests talk with them.

Their vocabulary is printable ASCII. With all bytes, random models mostly generate invalid UTF-8, which a
conversation shows as U+FFFD. The vocabulary has no >, so a > on a terminal is always a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf_copy import rewrite
from llamaspec import FixedLength, Pair, Sampling
from llamaspec.chat.session import ChatSettings, Session
from llamaspec.chat.template import KEY, ChatTemplate
from tiny_models import Recipe, write_llama
from tiny_vocabulary import CONTROL, MERGES, NORMAL, Vocabulary, byte_letters, sentencepiece_vocabulary

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"
)
# Jinja drops a newline at the very end of a template, unless an expression writes it.
PLAIN = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}### assistant:{{ '\n' }}"


def ascii_vocabulary() -> Vocabulary:
    """Byte-level BPE of printable ASCII without >."""
    letters = list(byte_letters())
    plain = [letters[byte] for byte in (0x0A, *range(0x20, 0x7F)) if byte != ord(">")]
    merges = tuple(merge for merge in MERGES if "Ã" not in merge)
    tokens = ("<s>", "</s>", *plain, *(merge.replace(" ", "") for merge in merges))
    types = (CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 2))
    return Vocabulary("gpt2", tokens, types, merges=merges)


ASCII = ascii_vocabulary()
SENTENCEPIECE = sentencepiece_vocabulary()
TALKER = Recipe(dtype="q8_0", vocabulary=ASCII, n_context=1 << 13)
ENDING = Recipe(dtype="q8_0", vocabulary=ASCII, n_context=1 << 11, end_score=9.0)  # answers of a few tokens


def write_chat_model(path: Path, recipe: Recipe, template: str | None = TEMPLATE) -> Path:
    """Write a Llama with a chat template."""
    plain = write_llama(path.with_suffix(".plain"), recipe)
    return with_template(plain, path, template) if template is not None else plain.rename(path)


def with_template(path: Path, new: Path, template: str) -> Path:
    """Copy a model file and add a chat template."""
    rewrite(path, new, {KEY: template})
    return new


def session(
    pair: Pair,
    *,
    seed: int = 5,
    max_tokens: int = 20,
    system: str | None = None,
    on_remark: Callable[[str], None] = lambda remark: None,
    template: ChatTemplate | None = None,
    n_drafted: int = 3,
    on_reasoning: Callable[[str], None] | None = None,
    **others: Any,
) -> Session:
    pair.target.forget()
    policy = FixedLength(n_drafted)
    settings = ChatSettings(Sampling(temperature=1.0), seed, max_tokens, "coupled", policy, **others)
    template = template or ChatTemplate.of(pair.target)
    return Session(pair, template, settings, system=system, on_remark=on_remark, on_reasoning=on_reasoning)


def say(session: Session, text: str) -> str:
    return "".join(session.ask(text))


def last(session: Session) -> tuple[int, int, int]:
    """Return the numbers of prompt tokens, cached tokens and generated tokens of the last answer."""
    assert session.last is not None
    completion = session.last.completion
    return completion.n_prompt_tokens, completion.n_cached, len(completion.tokens)
