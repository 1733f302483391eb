"""One text to generate in several ways, so that they can be compared."""

from __future__ import annotations

from dataclasses import dataclass

from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.events import Completion
from llamaspec.pair import Pair
from llamaspec.protocols import Drafter, LengthPolicy
from llamaspec.sampling.filters import Sampling
from llamaspec.values import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A prompt and how it is to be continued."""

    prompt: TokenArray  # [n]
    sampling: Sampling
    seed: int
    max_tokens: int
    rule: str

    @property
    def repeats(self) -> bool:
        """Whether the text with draft tokens is the text without: otherwise only its law is the same."""
        return self.rule == "coupled" or self.sampling.temperature == 0

    def run(
        self,
        pair: Pair,
        policy: LengthPolicy | None = None,
        *,
        n_before: int = 0,
        drafter: Drafter | None = None,
    ) -> Completion:
        """Generate with a pair; `n_before` runs before this one had the seeds before."""
        return pair.stream(
            self.prompt,
            sampling=self.sampling,
            seed=self.seed + n_before,
            max_tokens=self.max_tokens,
            rule=self.rule,
            policy=policy,
            drafter=drafter,
        ).run()

    def run_plain(self, pair: Pair, *, n_before: int = 0) -> Completion:
        """The same by plain decoding."""
        return self.run(pair, n_before=n_before, drafter=NoDrafter())
