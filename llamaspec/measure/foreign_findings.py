"""What a doctor says of a draft with another vocabulary than its target's: how well they fit, and a trial.

The trial is a short text of ours, so its acceptance is an order of magnitude; `compare` measures the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llamaspec.drafters.foreign import ForeignVocabulary, foreign_vocabulary
from llamaspec.errors import LlamaspecError
from llamaspec.length.fixed_length import FixedLength
from llamaspec.llama.model import LlamaModel
from llamaspec.measure.findings import OK, WARNING, Finding
from llamaspec.measure.sample_text import sample_tokens
from llamaspec.pair import Pair

N_PROMPT, N_WRITTEN, N_DRAFT = 64, 48, 2  # tokens
SECONDS = 5.0  # for the trial; a very large target writes less
FEW = 0.3  # of the draft tokens: below that drafting hardly ever pays


def foreign_findings(target: LlamaModel, draft: LlamaModel, clock: Callable[[], float]) -> Iterator[Finding]:
    """Overlap and acceptance of two models that number tokens differently."""
    try:
        foreign = foreign_vocabulary(target.vocabulary, draft.vocabulary)
    except LlamaspecError as error:
        yield Finding.of_error("vocabulary", error)
        return
    yield overlap_finding(foreign)
    yield acceptance_finding(target, draft, foreign, clock)


def overlap_finding(foreign: ForeignVocabulary) -> Finding:
    """How much of the target's vocabulary the draft has, and what is made of it."""
    overlap = foreign.overlap
    shared = f"{overlap.n_shared} of the target's {overlap.n_target} tokens"
    text = f"differs: the draft has {shared}, and {overlap.of_text:.0%} of those of an ordinary text; "
    if foreign.uses_intersection:
        return Finding(OK, "vocabulary", text + "it draws among these")
    text += f"its text is tokenized anew, {overlap.n_steps:.1f} draft tokens for one of the target's"
    return Finding(OK, "vocabulary", text)


def acceptance_finding(
    target: LlamaModel, draft: LlamaModel, foreign: ForeignVocabulary, clock: Callable[[], float]
) -> Finding:
    """What a short trial accepts, with the usual sampling."""
    pair, begin = Pair(target, draft, 0.0, foreign=foreign, clock=clock), clock()
    prompt = sample_tokens(target.vocabulary, N_PROMPT)
    stream = pair.stream(prompt, seed=0, max_tokens=N_WRITTEN, policy=FixedLength(N_DRAFT))
    for _ in stream:
        if clock() - begin > SECONDS:
            break
    stream.close()
    pair.forget()
    summary = stream.completion.summary
    rate = summary.acceptance_rate
    if rate is None:
        return Finding(OK, "acceptance", "not tried: the draft proposed nothing")
    text = f"{rate:.0%} of {summary.n_verified} draft tokens in a trial on a short text"
    if rate >= FEW:
        return Finding(OK, "acceptance", text)
    remedy = "choose a draft of the target's family; a comparison shows whether drafting pays"
    return Finding(WARNING, "acceptance", text, remedy)
