"""Fields that the four APIs share, with their ranges, and the text job that follows from them.

What is unknown is ignored, as llama-server does. What is known and wrong is refused, with its name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from llamaspec.llama.options import MAX_DRAFT
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.sampling.parameters import Sampling
from llamaspec.serve.faults import RequestError, not_supported
from llamaspec.serve.jobs import Drafting

MAX_STOPS = 32
_ALL = (1 << 31) - 1  # tokens
_NEVER = -1e30  # bias of a token that is not drawn
_TINY = 1e-9  # a top-p of 0: only the best token

StopText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
CountOrAny = Count | Literal[-1]  # the latter as llama-server has it


class Fields(BaseModel):
    """A part of a request: strict about what it knows, silent about the rest."""

    # pydantic would keep 16,384 short texts of clients, in case that they come again.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, cache_strings="none")


class SpeculativeFields(Fields):
    """How to draft for this request. The text stays the same under the coupled rule."""

    enabled: bool | None = None
    max_draft: Annotated[int, Field(ge=0, le=MAX_DRAFT)] | None = None
    rule: Literal["coupled", "rejection", "block"] | None = None
    ngram: bool | None = None
    spans: bool | None = None  # tell which text was drafted
    rounds: bool | None = None  # tell each evaluation

    def drafting(self) -> Drafting:
        """The same for the decoder."""
        return Drafting(self.enabled is not False, self.max_draft, self.rule or DEFAULT_RULE, self.ngram)


class StreamOptions(Fields):
    """What a stream should tell."""

    include_usage: bool | None = None


class SamplingFields(Fields):
    """How tokens are drawn; null and what is left out are llama.cpp's values."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    speculative: SpeculativeFields | None = None

    def sampling(self, ends: Iterable[int] = ()) -> Sampling:
        """The same for the decoder. `ends`: the tokens that end a text, for requests that want none to."""
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        if self.ignore_eos:
            bias |= dict.fromkeys(ends, _NEVER)
        usual = Sampling()
        top_p = usual.top_p if self.top_p is None else self.top_p
        min_p = usual.min_p if self.min_p is None else self.min_p
        top_k = usual.top_k if self.top_k is None else self.top_k
        is_penalised = self.repeat_last_n != 0
        return Sampling(
            temperature=usual.temperature if self.temperature is None else self.temperature,
            top_k=top_k if top_k is not None and top_k > 0 else None,
            top_p=None if top_p == 1 else max(top_p or 0.0, _TINY),
            min_p=min_p or None,
            repeat_penalty=self.repeat_penalty if is_penalised and self.repeat_penalty != 1 else None,
            presence_penalty=(is_penalised and self.presence_penalty) or None,
            frequency_penalty=(is_penalised and self.frequency_penalty) or None,
            penalty_window=self._penalty_window,
            logit_bias=bias or None,
        )

    @property
    def _penalty_window(self) -> int | None:
        """OpenAI's two penalties alone are over what was generated, llama.cpp's over the last tokens."""
        if self.repeat_last_n is None and self.repeat_penalty in (None, 1):
            return None
        if self.repeat_last_n == -1:  # all of the text
            return _ALL
        return self.repeat_last_n or Sampling().penalty_window

    def seed_or_random(self) -> int:
        """The seed; -1 and none mean any."""
        return secrets.randbits(32) if self.seed in (None, -1) else int(self.seed or 0)

    def drafting(self) -> Drafting:
        """How to draft."""
        return Drafting() if self.speculative is None else self.speculative.drafting()

    def check_tokens(self, n_vocabulary: int) -> None:
        """Check token ids against the vocabulary.

        Raises
        ------
        RequestError
            One is not of it.
        """
        if self.logit_bias and max(map(int, self.logit_bias)) >= n_vocabulary:
            message = f"logit_bias: token ids must be from 0 to {n_vocabulary - 1}"
            raise RequestError(400, message, field="logit_bias")

    @property
    def wants_spans(self) -> bool:
        """Whether a stream tells which text was drafted."""
        return self.speculative is not None and bool(self.speculative.spans)

    @property
    def wants_rounds(self) -> bool:
        """Whether the answer tells each evaluation."""
        return self.speculative is not None and bool(self.speculative.rounds)


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings from a field that is one, several or none."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def refuse_unsupported(**given: object) -> None:
    """Refuse fields that are set and that this server knows, but cannot obey.

    Raises
    ------
    RequestError
        Names the first.
    """
    for field, value in given.items():
        if value:
            raise not_supported(field)
