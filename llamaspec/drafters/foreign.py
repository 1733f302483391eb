"""A draft with another vocabulary than its target: which of two ways makes its tokens the target's.

*Intersection* where most tokens of a text are in both: the draft draws among these. *Alignment* else: it
writes text, which is tokenized anew. tests/llama/test_foreign.py opens such pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llamaspec.drafters.grammar import AllowedDrafter
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.spelling import Spelling
from llamaspec.drafters.text_alignment import AlignedDrafter
from llamaspec.drafters.token_map import Overlap, TokenMap
from llamaspec.errors import PairError
from llamaspec.protocols import Drafter, WholeVocabulary
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE, RULES
from llamaspec.sampling.parameters import Sampling

MOSTLY = 0.8  # of a text's tokens must be shared for intersection
SAMPLE = """\
def mean(values: list[float]) -> float:
    \"\"\"The arithmetic mean of 2 or more values.\"\"\"
    if len(values) < 2:
        raise ValueError(f"got {len(values)} values, want 2 or more")
    return sum(values) / len(values)

The committee met again on Thursday, but it didn't reach a decision: 14 of its 23 members wanted to wait until
the engineers' report (about 1,250 pages) had been translated. "We have time," said the chairwoman.

{"name": "Ada", "born": 1815, "tags": ["first", "second"], "active": true}
"""


@dataclass(frozen=True, slots=True, eq=False)
class ForeignVocabulary:
    """How the draft's vocabulary relates to the target's."""

    target: Spelling
    draft: Spelling
    tokens: TokenMap
    overlap: Overlap
    uses_intersection: bool

    def adapted(self, drafter: ModelDrafter) -> Drafter:
        """The drafter for this vocabulary, in place of one for the target's own."""
        if self.uses_intersection:
            return replace(drafter, tokens=self.tokens)
        is_coupled = drafter.rule is RULES[DEFAULT_RULE]
        sampling = replace(
            drafter.sampling if is_coupled else Sampling(temperature=0),
            logit_bias=None, repeat_penalty=None, presence_penalty=None, frequency_penalty=None,
        )  # fmt: skip
        aligned = AlignedDrafter(
            self.target,
            self.draft,
            self.tokens,
            drafter.context_size,
            sampling,
            drafter.rule,
            drafter.streams,
            self.overlap.whole,
        )
        if drafter.constraint is None:
            return aligned
        return AllowedDrafter(aligned, drafter.constraint, drafter.n_prompt)


def foreign_vocabulary(target: WholeVocabulary, draft: WholeVocabulary) -> ForeignVocabulary:
    """Compare two vocabularies.

    Raises
    ------
    PairError
        The draft's cannot spell an ordinary text.
    """
    spellings = Spelling(target), Spelling(draft)
    tokens, text = TokenMap(*spellings), SAMPLE.encode()
    for name, spelling in zip(("target", "draft"), spellings, strict=True):
        if spelling.text(spelling.tokens(text)) != text:
            raise PairError(f"the {name}'s vocabulary cannot spell an ordinary text; choose another {name}")
    overlap = Overlap(*spellings, tokens, text)
    return ForeignVocabulary(*spellings, tokens, overlap, overlap.of_text >= MOSTLY)
