"""llamaspec makes a large GGUF model answer faster without changing what it says.

>>> import llamaspec
>>> with llamaspec.open_pair("target.gguf", "draft.gguf") as pair:  # doctest: +SKIP
...     for piece in pair.stream("Once upon a time", seed=7):
...         print(piece.text, end="", flush=True)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from llamaspec.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        return getattr(import_module("llamaspec.public"), name)
