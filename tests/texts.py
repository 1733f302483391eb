"""Completions by fake models, each in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fakes import CountingUp, FakeModel, Length, tokens
from llamaspec.drafters.model import ModelDrafter, SameTokens
from llamaspec.engine.detokenizer import Detokenizer
from llamaspec.engine.speculate import Speculation
from llamaspec.engine.stream import TextStream
from llamaspec.engine.thread import ComputeThread
from llamaspec.protocols import Drafter
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import DRAFT, TARGET, Logits, TokenArray, scope_of
from stepped import Stepped

PLAIN = Sampling(temperature=1.0, top_k=None, top_p=None, min_p=None)
V = 7


@dataclass
class Letters:
    """Token n is the n-th letter; token `mute` has no text."""

    end: int | None = None
    mute: int | None = None

    def tokenize(self, text: bytes) -> TokenArray:
        return np.array([byte - 97 for byte in text], dtype=np.int32)

    def piece(self, token: int) -> bytes:
        return b"" if token == self.mute else bytes([97 + token])

    def is_end(self, token: int) -> bool:
        return token == self.end


class Alphabet(FakeModel):
    """Generates the alphabet, again and again."""

    def after(self, tokens: TokenArray) -> Logits:
        following = (int(tokens[-1]) + 1) % self.vocabulary_size
        logits: Logits = np.eye(self.vocabulary_size, dtype=np.float32)[following] * 40
        return logits


def target(**settings: object) -> FakeModel:
    return FakeModel(1, vocabulary_size=V, **settings)  # type: ignore[arg-type]


def draft(**settings: object) -> FakeModel:
    return FakeModel(2, vocabulary_size=V, **settings)  # type: ignore[arg-type]


def model_drafter(model: FakeModel, seed: int, rule: str = "coupled") -> ModelDrafter:
    same = SameTokens(model.vocabulary_size, model.vocabulary_size)
    return ModelDrafter(same, model.context_size, Sampler(PLAIN), RULES[rule], SeededStreams(seed))


def stream(
    thread: ComputeThread,
    models: Mapping[str, FakeModel],
    prompt: Sequence[int] = (1, 2),
    *,
    seed: int = 0,
    length: Length | None = None,
    drafter: Drafter | None = None,
    max_tokens: int = 12,
    vocabulary: Letters | None = None,
    stops: Sequence[str] = (),
    spelled: Mapping[int, bytes] | None = None,
    n_logprobs: int | None = None,
    n_cached: Callable[[TokenArray], int] = lambda tokens: 0,
    scope: str = "",
    **settings: object,
) -> TextStream:
    """Return a stream; by default the draft model drafts, if there is one."""
    model = models[TARGET]
    if drafter is None:
        drafter = model_drafter(models[DRAFT], seed) if DRAFT in models else CountingUp(model.vocabulary_size)
    speculation = Speculation(
        tokens(*prompt), max_tokens, model.context_size, RULES["coupled"], PLAIN, SeededStreams(seed),
        drafter=drafter, length=length or Length(2), max_scored=model.max_scored, n_logprobs=n_logprobs,
        n_cached=n_cached, scope=scope_of(scope),
    )  # fmt: skip
    text = Detokenizer(vocabulary or Letters(), stops, spelled)
    return TextStream(speculation, text, thread, **settings)  # type: ignore[arg-type]


def alone(prompt: Sequence[int] = (1, 2), seed: int = 0, max_tokens: int = 12) -> tuple[int, ...]:
    """Return the tokens of plain decoding, with no other sequence."""
    models = {TARGET: target(context_size=4096)}
    made = stream(Stepped(models), models, prompt, seed=seed, length=Length(), max_tokens=max_tokens)
    return made.run().tokens
