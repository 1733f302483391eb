"""The exceptions that llamaspec raises on purpose. Each message names the cause, the value and the remedy.

LlamaspecError
├── ModelFileError            the file is missing, damaged or of a kind that cannot generate text
│   ├── NoTemplateError       the file has no chat template
│   └── FetchError            the hub has no such file, or it cannot be fetched
├── PairError                 two models cannot work together
├── PromptError               the prompt is empty, too long or unreadable
│   ├── ConstraintError       the JSON schema or grammar cannot be used
│   └── TemplateError         the chat template is invalid, or refuses a conversation
│       └── SystemPromptError   the chat template refuses the system prompt
├── DeviceError               llama.cpp cannot compute on the device
├── InexactError              bit-identical results were asked for and are impossible
├── ClosedError               the pair was closed, or belongs to the process before a fork
├── MemoryFullError           the machine has too little memory
│   └── ContextFullError      the context has no room for a sequence
└── EvaluationError           llama.cpp failed during an evaluation
    ├── EvaluationAbortedError  the evaluation was aborted on purpose
    ├── RowsMissingError        a draft model lacks hidden rows of the target
    ├── ScoresError             the model's scores are not finite numbers
    └── WorkerError             a worker on another machine cannot be reached
"""

from __future__ import annotations

import re

# Control characters (C0, C1, DEL), line separators, bidirectional and invisible format characters, halves of
# surrogate pairs. Joiners stay: scripts and emoji need them.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


class LlamaspecError(Exception):
    """Base of all errors that a user can act on."""


class ModelFileError(LlamaspecError):
    """A model file cannot be used."""


class NoTemplateError(ModelFileError):
    """The model's file has no chat template."""


class FetchError(ModelFileError):
    """The hub has no such model, or it cannot be fetched. The message names no file of this machine."""


class PairError(LlamaspecError):
    """Two models cannot work together."""


class PromptError(LlamaspecError):
    """The prompt cannot be used."""


class ConstraintError(PromptError):
    """A JSON schema or a grammar cannot be used."""


class TemplateError(PromptError):
    """The chat template is invalid, or refuses a conversation."""


class SystemPromptError(TemplateError):
    """The chat template refuses the system prompt."""


class DeviceError(LlamaspecError):
    """llama.cpp cannot compute on a device."""


class InexactError(LlamaspecError):
    """Results may depend on what is evaluated beside them."""


class ClosedError(LlamaspecError):
    """The pair is not open in this process."""


class MemoryFullError(LlamaspecError):
    """There is not enough memory."""


class ContextFullError(MemoryFullError):
    """The context has no room for a sequence."""


class EvaluationError(LlamaspecError):
    """llama.cpp failed during an evaluation."""


class EvaluationAbortedError(EvaluationError):
    """An evaluation was aborted on purpose."""


class RowsMissingError(EvaluationError):
    """A draft model lacks hidden rows for the tokens after the first `n_cached`."""

    def __init__(self, n_cached: int) -> None:
        super().__init__(f"the hidden rows of tokens after the first {n_cached} are not known")
        self.n_cached = n_cached


class WorkerError(EvaluationError):
    """A worker on another machine cannot be reached."""


class ScoresError(EvaluationError):
    """The scores of a model are not finite numbers: its file is damaged."""


EVALUATION_FAULTS = (EvaluationError, MemoryFullError)  # thrown instead of an answer to a `ForwardRequest`


def printable(text: str, keep: str = "") -> str:
    """Escape control characters, so that a terminal can show text from models, files and hubs.

    The characters in `keep`, such as a newline, stay as they are.

    Examples
    --------
    >>> printable("a\\x1b[2Jb\\n", keep="\\n")
    'a\\\\x1b[2Jb\\n'
    """
    return _UNPRINTABLE.sub(
        lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1],
        text,
    )


def quoted(text: str) -> str:
    """Escape and shorten a name from outside for a message of one line."""
    return f"{printable(text[:200])}{'...' if len(text) > 200 else ''}"
