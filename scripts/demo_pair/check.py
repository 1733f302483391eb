"""Is the written file the trained model? Same tokens, same logits up to Q8_0's rounding.

The one idea: two implementations, one input. The tokenizers library against llama.cpp's tokenizer on
awkward text, torch in float32 against llama.cpp on real text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from llama_cpp import Llama as LlamaCpp
from tokenizers import Tokenizer

from llamaspec.draft_making.student import Llama

AWKWARD = (
    "",
    " ",
    "\n",
    "\n\n\n    return x\n",
    "a  b   c    d\t\te \t f\r\n\r\n  g",
    "   leading and trailing   ",
    "1 12 123 1234 12345.67890e-10 0xDEADBEEF 1_000_000",
    "it's we'll they've I'd you're I'm IT'S WE'LL",
    "naïve café Ünïcödé Ελληνικά Русский العربية हिन्दी ไทย 日本語 한국어 中文",
    "emoji 🙂🙃👩‍👩‍👧‍👦 ½ ² ① Ⅷ ٣ 𐍈",
    "\u00a0non-breaking\u2003em\u3000ideographic\u200bzero\u2028line\u0085next",
    "x==y!=z<=w>=v//u**t@s->r:=q...p",
    "def f(x):\n\treturn {'a': [1, 2, (3, 4)], \"b\": None}  # noqa: E501\n",
    "=" * 200 + "\n" + "-" * 77 + "\n" + "#" * 3,
    "\x00\x01\x7f\ufffd\ufeffbom",
    "combining e\u0301 a\u0308 \u0301",
)


@dataclass(frozen=True)
class LogitGap:
    """How far llama.cpp's logits lie from torch's."""

    most: float
    mean: float
    same_argmax: float  # share of positions

    def __str__(self) -> str:
        return (
            f"logits differ by {self.mean:.4f} (mean), {self.most:.3f} (most)"
            f"; same argmax {self.same_argmax:.4f}"
        )


def different_tokens(model: LlamaCpp, tokenizer: Tokenizer, texts: Iterable[str]) -> list[str]:
    """Return the texts that the two tokenizers split differently (there should be none)."""
    return [
        text
        for text in texts
        if model.tokenize(text.encode(), add_bos=False, special=False) != tokenizer.encode(text).ids
        or model.detokenize(tokenizer.encode(text).ids) != text.encode()
    ]


@torch.no_grad()
def logit_gap(model: LlamaCpp, trained: Llama, ids: list[int]) -> LogitGap:
    """Compare the logits of every position of `ids`."""
    model.reset()
    model.eval(ids)
    theirs = model.scores[: len(ids)]
    ours = trained.logits(trained.hidden(torch.tensor([ids]), dtype=torch.float32)[0]).numpy()
    gap = np.abs(theirs - ours)
    return LogitGap(float(gap.max()), float(gap.mean()), float((theirs.argmax(-1) == ours.argmax(-1)).mean()))
