"""An error as one line: the library names the cause and the remedy, the command line adds the options."""

from __future__ import annotations

from llamaspec.chat.template import NoTemplateError, SystemPromptError, TemplateError
from llamaspec.errors import ContextFullError, LlamaspecError, MemoryFullError, PairError

# The first class that fits counts.
_OPTIONS: tuple[tuple[type[LlamaspecError], tuple[str, ...]], ...] = (
    (NoTemplateError, ("--target", "--chat-template")),
    (SystemPromptError, ("--system",)),
    (TemplateError, ("--chat-template",)),
    (ContextFullError, ("--n-ctx",)),
    (MemoryFullError, ("--n-ctx", "--gpu-layers")),
    (PairError, ("--draft",)),
)


def message_of(error: LlamaspecError) -> str:
    """What to tell a person."""
    options = options_of(error)
    return f"{error} ({', '.join(options)})" if options else str(error)


def options_of(error: LlamaspecError) -> tuple[str, ...]:
    """The options of the remedy; none where the message names one itself."""
    options = next((options for kind, options in _OPTIONS if isinstance(error, kind)), ())
    return () if any(option in str(error) for option in options) else options
