"""The names that `import llamaspec` offers.

`llamaspec/__init__.py` imports this module when a name is first used, so that the command shows its help
without loading numpy and llama.cpp.
"""

from llamaspec.chat.prompt import chat_prompt
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.drafters.model import ModelDrafter
from llamaspec.embedder import Embedder, open_embedder
from llamaspec.engine.completion import Completion, StopReason, Summary
from llamaspec.engine.detokenizer import Piece
from llamaspec.engine.stream import TextStream
from llamaspec.errors import (
    ClosedError,
    ConstraintError,
    ContextFullError,
    EvaluationError,
    LlamaspecError,
    MemoryFullError,
    ModelFileError,
    PairError,
    PromptError,
)
from llamaspec.length.automatic import AutoLength
from llamaspec.length.fixed import FixedLength
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import ModelOptions
from llamaspec.opening import open_pair
from llamaspec.pair import Pair, demo_draft, demo_target
from llamaspec.protocols import Constraint
from llamaspec.sampling.filters import Sampling
from llamaspec.values import Distribution, Draft, Logprobs, Round

__all__ = [
    "AutoLength",
    "ClosedError",
    "Completion",
    "Constraint",
    "ConstraintError",
    "ContextFullError",
    "Distribution",
    "Draft",
    "Embedder",
    "EvaluationError",
    "FixedLength",
    "LlamaModel",
    "LlamaspecError",
    "Logprobs",
    "MemoryFullError",
    "ModelDrafter",
    "ModelFileError",
    "ModelOptions",
    "NoDrafter",
    "Pair",
    "PairError",
    "Piece",
    "PromptError",
    "Round",
    "Sampling",
    "StopReason",
    "Summary",
    "TextStream",
    "chat_prompt",
    "demo_draft",
    "demo_target",
    "open_embedder",
    "open_pair",
]
