"""llamaspec makes a large GGUF model answer faster without changing what it says.

>>> import llamaspec
>>> with llamaspec.open_pair("target.gguf", "draft.gguf") as pair:  # doctest: +SKIP
...     for piece in pair.stream("Once upon a time", seed=7):
...         print(piece.text, end="", flush=True)
"""

from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.no_drafter import NoDrafter
from llamaspec.drafters.past import PastTexts
from llamaspec.engine.events import Completion, Piece, StopReason
from llamaspec.engine.statistics import Summary
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
from llamaspec.length.auto_length import AutoLength
from llamaspec.length.fixed_length import FixedLength
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import ModelOptions
from llamaspec.opening import demo_draft, demo_target, open_pair
from llamaspec.pair import Pair
from llamaspec.protocols import Constraint
from llamaspec.sampling.parameters import Sampling
from llamaspec.values import Distribution, Draft, Logprobs, Round

__version__ = "0.1.0"

SilentDrafter = NoDrafter  # its name in the first version

__all__ = [
    "AutoLength",
    "ClosedError",
    "Completion",
    "Constraint",
    "ConstraintError",
    "ContextFullError",
    "Distribution",
    "Draft",
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
    "PastTexts",
    "Piece",
    "PromptError",
    "Round",
    "Sampling",
    "SilentDrafter",
    "StopReason",
    "Summary",
    "TextStream",
    "demo_draft",
    "demo_target",
    "open_pair",
]
