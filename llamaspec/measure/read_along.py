"""How often a draft would be right: it reads the target's own texts along, and draws with the same noise.

Under the coupled rule a draft token is accepted where draft and target draw the same token. So the share of
such positions is the acceptance itself, from one reading of the text; rounds of any length can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamaspec.llama.model import LlamaModel
from llamaspec.measure.task import Task
from llamaspec.pair import Pair
from llamaspec.protocols import Stream
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import TARGET, ForwardRequest, TokenArray

Agreed = npt.NDArray[np.bool_]  # [n] for each token of a text, whether the draft would have drawn it


@dataclass(frozen=True, slots=True, eq=False)
class WrittenText:
    """A text that the target wrote behind a prompt."""

    tokens: TokenArray  # [n_prompt + n]
    n_prompt: int
    seconds: float  # that writing took


def write_texts(pair: Pair, tasks: Sequence[Task]) -> list[WrittenText]:
    """Let the target write; what ends before its first token is left out."""
    written = []
    for task in tasks:
        completion = task.run_plain(pair)
        if completion.tokens:
            tokens = np.concatenate([task.prompt, np.array(completion.tokens, dtype=np.int32)])
            seconds = completion.summary.decode_seconds
            written.append(WrittenText(tokens, len(task.prompt), seconds))
    return written


def read_along(draft: LlamaModel, text: WrittenText, sampling: Sampling, seed: int) -> Agreed:
    """Where the draft would have drawn the target's token; its KV cache is emptied."""
    streams, sampler = SeededStreams(seed), Sampler(sampling, text.n_prompt)
    agreed: list[bool] = []
    draft.forget()
    for start in range(text.n_prompt, len(text.tokens), draft.max_scored):
        end = min(start + draft.max_scored, len(text.tokens))
        begin = max(0, end - 1 - draft.context_size)
        logits = draft.forward(ForwardRequest(TARGET, text.tokens[begin : end - 1], end - start))
        for position, scores in zip(range(start, end), logits, strict=True):
            if not np.isfinite(scores.max()):
                agreed.append(False)
                continue
            q = sampler.distribution(scores, text.tokens[:position])
            agreed.append(streams.choose(q, Stream.TOKEN, position) == text.tokens[position])
    draft.release(-1)
    return np.array(agreed, dtype=np.bool_)


def replay(agreed: Sequence[Agreed], seconds: Sequence[float]) -> tuple[int, float]:
    """The best constant number of draft tokens, at least 1, on these texts; its speed next to plain decoding.

    Parameters
    ----------
    agreed : sequence of [n] bool
        At least one text.
    seconds : [longest + 1]
        Of a round with 0, 1, ... draft tokens.

    Examples
    --------
    >>> replay([np.array([True, True, False])], [1.0, 1.1, 1.2])
    (2, 1.25)
    """
    n_tokens = sum(map(len, agreed))
    rounds = [sum(_n_rounds(one, n) for one in agreed) for n in range(1, len(seconds))]
    speeds = [n_tokens * seconds[0] / (n * each) for n, each in zip(rounds, seconds[1:], strict=True)]
    best = int(np.argmax(speeds))
    return best + 1, speeds[best]


def _n_rounds(agreed: Agreed, n: int) -> int:
    """Rounds of `n` draft tokens that a text takes."""
    n_rounds = at = 0
    while at < len(agreed):
        rejected = np.flatnonzero(~agreed[at : at + n])
        at += (int(rejected[0]) if len(rejected) else n) + 1
        n_rounds += 1
    return n_rounds
