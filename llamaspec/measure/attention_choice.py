"""How attention is best computed for a model, from what was measured of its shape.

On CPUs the fastest way in long texts is another on every machine. It is chosen for the text at hand, or for
those that a context has room for; or one that is bit-identical at every width where that costs less than
EXACT_WORTH. Times nothing: `attention.py` does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamaspec.llama.attention import AttentionShape, ModelSize
from llamaspec.llama.options import BATCH
from llamaspec.measure.attention import FEWEST_TURNS, PLAIN, AttentionProbe, Configuration, Turn

WORTH = 1.1  # times as fast as PLAIN another must be, which is exact until a text has MATTERS tokens
EXACT_WORTH = 1.03  # times the fastest: so much may bit-identical widths cost
MATTERS = 256  # tokens: up to there PLAIN is exact, and hardly slower than any
BYTES_PER_TOKEN = 4  # of a prompt, roughly
STEADY = 1.05  # what is the fastest by half of the turns must be within this of it by the others
EVERY, ODD, EVEN = slice(None), slice(None, None, 2), slice(1, None, 2)  # turns


@dataclass(frozen=True, slots=True)
class TextSize:
    """How many tokens of a text are read, and then written."""

    n_read: int
    n_written: int

    @property
    def n_tokens(self) -> int:
        """Both."""
        return self.n_read + self.n_written

    @classmethod
    def expected(cls, prompt: bytes, max_tokens: int) -> TextSize:
        """Of a text that begins with a prompt, which no model has read yet."""
        return cls(-(-len(prompt) // BYTES_PER_TOKEN), max_tokens)

    def within(self, n_ctx: int) -> TextSize:
        """What a context has room for."""
        n_read = min(self.n_read, n_ctx)
        return TextSize(n_read, min(self.n_written, n_ctx - n_read))


USUAL = tuple(TextSize(n - n // 4, n // 4) for n in (450, 1800, 3600, 7200))  # where no text is known yet


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a model and a text, or a length of context."""

    configuration: Configuration
    is_exact: bool
    is_steady: bool  # whether the machine was quiet enough to believe it
    gain: float  # speed divided by that of PLAIN
    exact_cost: float | None  # time of the best exact one divided by that of the fastest; None: none is exact

    @property
    def summary(self) -> str:
        """For people, in a few words."""
        text = str(self.configuration)
        if self.configuration != PLAIN:
            text += f", {self.gain:.2f} times as fast as llama.cpp's default"
        if self.is_exact:
            return f"{text}; the same numbers at every batch width"
        if self.exact_cost is None:
            return f"{text}; behind {MATTERS} tokens no choice has the same numbers at every batch width"
        return f"{text}; what is the same at every batch width takes {self.exact_cost:.2f} times as long"


def choose(
    probe: AttentionProbe,
    size: ModelSize,
    n_ctx: int,
    *,
    text: TextSize | None = None,
    room: int | None = None,
    is_draft: bool = False,
    n_texts: int = 1,
) -> Choice:
    """The configuration for a model.

    Parameters
    ----------
    probe : AttentionProbe
        Of its shape.
    size : ModelSize
    n_ctx : int
        Tokens that a text can have.
    text : TextSize, optional
        The one that is to be written; else of many lengths, as far as the context allows.
    room : int, optional
        Bytes of memory of the machine; without flash attention a long context takes some of them.
    is_draft : bool
        It writes single positions, and the text does not depend on it.
    n_texts : int
        That share the KV cache.
    """
    measured = [one for one in probe.measured if _fits(one.configuration, size.shape, n_ctx, room)]
    usual = [one for one in USUAL if one.n_tokens <= n_ctx] or [TextSize(n_ctx - n_ctx // 4, n_ctx // 4)]
    texts = usual if text is None else [text.within(n_ctx)]

    def times(texts: Sequence[TextSize], some: slice = EVERY) -> dict[Configuration, float]:
        """Logarithm of the seconds, mean over texts, from some of the turns."""
        plain, found = probe.measured[0].best(some), dict[Configuration, float]()
        for one in measured:
            both, passed = (one.best(some), plain), _passed(one.configuration, n_texts)
            found[one.configuration] = statistics.mean(
                math.log(_seconds(probe, both, size, each, passed, is_draft)) for each in texts
            )
        return found

    typical = times(texts)
    fastest = min(typical, key=lambda configuration: typical[configuration])
    may_be_exact = text is None or text.n_read < MATTERS
    if may_be_exact and typical[PLAIN] - typical[fastest] < math.log(WORTH):
        fastest = PLAIN
    exact = [one.configuration for one in measured if one.is_exact]
    best_exact = min(exact, key=lambda configuration: typical[configuration], default=None)
    cost = None if best_exact is None else math.exp(typical[best_exact] - typical[fastest])
    chosen = fastest
    if best_exact is not None and cost is not None and cost < EXACT_WORTH and not is_draft:
        chosen = best_exact
    is_steady = len(measured[0].turns) >= FEWEST_TURNS and _agree(times(USUAL, ODD), times(USUAL, EVEN))
    if not is_steady:
        chosen = PLAIN
    gain = math.exp(typical[PLAIN] - typical[chosen])
    return Choice(chosen, chosen in exact, is_steady, gain, cost)


def _agree(one: Mapping[Configuration, float], other: Mapping[Configuration, float]) -> bool:
    """Whether what is the fastest by one half of the turns is nearly so by the other."""
    best, others_best = min(one, key=lambda c: one[c]), min(other, key=lambda c: other[c])
    return max(other[best] - other[others_best], one[others_best] - one[best]) <= math.log(STEADY)


def _passed(configuration: Configuration, n_texts: int) -> float:
    """Cells that attention goes over for each of a text, where half of the others are running.

    Flash attention hardly looks at those of others; without it they cost as much as its own.
    """
    return (1 + n_texts) / 2 if configuration.flash_attention == "off" else 1.0


def _seconds(
    probe: AttentionProbe,
    turns: tuple[Turn, Turn],
    size: ModelSize,
    text: TextSize,
    passed: float,
    is_draft: bool,
) -> float:
    """All of a text, where attention goes over `passed` cells for each of its own; `turns`: this, PLAIN's."""
    n_layers, n_bytes = size.shape.n_layers, size.n_read_bytes

    def attention(own: float, plain: float, depth: float) -> float:
        """Up to MATTERS tokens nothing is faster than PLAIN."""
        near, far = min(depth, MATTERS), max(depth - MATTERS, 0.0)
        return n_layers * (max(passed * own, plain) * near + passed * own * far)

    own, plain = turns
    behind = text.n_read + text.n_written / 2
    single = n_bytes * probe.weights_single + attention(own.single, plain.single, behind)
    several = n_bytes * probe.weights_several + attention(own.several, plain.several, behind)
    writing = single if is_draft else (single + several / 2) / 2  # rounds without a draft, and with
    reading = size.n_parameters * probe.weights_reading + attention(
        own.reading, plain.reading, text.n_read / 2
    )
    return text.n_read * reading + text.n_written * writing


def _fits(configuration: Configuration, shape: AttentionShape, n_ctx: int, room: int | None) -> bool:
    """Without flash attention all scores of a batch are kept: [heads, BATCH, context] float32."""
    return configuration.flash_attention == "on" or (
        room is None or 4 * shape.n_heads * BATCH * n_ctx <= room // 8
    )
