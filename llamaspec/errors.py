"""The exceptions that llamaspec raises on purpose. Each message names the fault, the value and the remedy.

LlamaspecError
├── ModelFileError    the file is missing, damaged or of a kind that cannot generate text
├── PairError         target and draft do not speak the same tokens
├── PromptError       the prompt is empty, too long or not readable
├── MemoryFullError   the context or the machine has no room
└── EvaluationError   llama.cpp failed while it computed
"""

from __future__ import annotations


class LlamaspecError(Exception):
    """Base of all errors that a user can act on."""


class ModelFileError(LlamaspecError):
    """A model file cannot be used."""


class PairError(LlamaspecError):
    """Two models cannot work together."""


class PromptError(LlamaspecError):
    """The prompt cannot be used."""


class MemoryFullError(LlamaspecError):
    """There is no room for what was asked."""


class EvaluationError(LlamaspecError):
    """llama.cpp reported a failure during an evaluation."""
