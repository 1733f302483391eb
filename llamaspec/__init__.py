"""llamaspec makes a large GGUF model answer faster without changing what it says.

>>> import llamaspec
>>> with llamaspec.open_pair("target.gguf", "draft.gguf") as pair:  # doctest: +SKIP
...     for piece in pair.stream("Once upon a time", seed=7):
...         print(piece.text, end="", flush=True)
"""

from llamaspec.app.pair import Pair, demo_draft, demo_target, open_pair
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.silent import SilentDrafter
from llamaspec.engine.generate import Completion, Piece, StopReason, TextStream
from llamaspec.errors import (
    EvaluationError,
    LlamaspecError,
    MemoryFullError,
    ModelFileError,
    PairError,
    PromptError,
)
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import ModelOptions
from llamaspec.rules.auto_length import AutoLength
from llamaspec.rules.lengths import FixedLength
from llamaspec.rules.stats import Summary
from llamaspec.values import Ask, Distribution, Draft, Round, Sampling

__version__ = "0.1.0"

__all__ = [
    "Ask",
    "AutoLength",
    "Completion",
    "Distribution",
    "Draft",
    "EvaluationError",
    "FixedLength",
    "LlamaModel",
    "LlamaspecError",
    "MemoryFullError",
    "ModelDrafter",
    "ModelFileError",
    "ModelOptions",
    "Pair",
    "PairError",
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
