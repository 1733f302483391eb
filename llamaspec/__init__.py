"""llamaspec makes a large GGUF model answer faster without changing what it says.

>>> import llamaspec
>>> with llamaspec.open_pair("target.gguf", "draft.gguf") as pair:  # doctest: +SKIP
...     for piece in pair.stream("Once upon a time", seed=7):
...         print(piece.text, end="", flush=True)
"""

__version__ = "0.3.0"

TYPE_CHECKING = False  # as in `typing`, which is slow to import

if TYPE_CHECKING:
    from llamaspec.public import *  # noqa: F403
else:

    def __getattr__(name):
        from importlib import import_module

        return getattr(import_module("llamaspec.public"), name)

    def __dir__():
        from llamaspec import public

        return ["__version__", *public.__all__]
