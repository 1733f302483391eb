"""What a doctor says of a draft with another vocabulary than its target's: how well they fit, and a trial.

The trial is a short text of ours, so its acceptance is an order of magnitude; `compare` measures the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llamaspec.drafters.common_vocabulary import CommonTokens
from llamaspec.errors import LlamaspecError
from llamaspec.length.fixed_length import FixedLength
from llamaspec.llama.model import LlamaModel
from llamaspec.measure.findings import OK, WARNING, Finding
from llamaspec.measure.probe import sample_tokens
from llamaspec.pair import Pair

N_PROMPT, N_WRITTEN, N_DRAFT = 64, 48, 2  # tokens
SECONDS = 5.0  # for the trial; a very large target writes less
FEW = 0.3  # of the draft tokens: below that drafting hardly ever pays


def foreign_findings(target: LlamaModel, draft: LlamaModel, clock: Callable[[], float]) -> Iterator[Finding]:
    """Common tokens and acceptance of two models that number tokens differently."""
    try:
        common = CommonTokens(target.vocabulary, draft.vocabulary)
    except LlamaspecError as error:
        yield Finding.of_error("vocabulary", error)
        return
    yield overlap_finding(common)
    yield acceptance_finding(target, draft, common, clock)


def overlap_finding(common: CommonTokens) -> Finding:
    """How much of the target's vocabulary the draft has."""
    shared = f"{common.is_common.sum()} of the target's {len(common.is_common)} tokens"
    text = f"differs: the draft has {shared}, and {common.of_text:.0%} of those of an ordinary text; "
    return Finding(OK, "vocabulary", text + "it draws among these")


def acceptance_finding(
    target: LlamaModel, draft: LlamaModel, common: CommonTokens, clock: Callable[[], float]
) -> Finding:
    """What a short trial accepts, with the usual sampling."""
    pair, begin = Pair(target, draft, 0.0, common=common, clock=clock), clock()
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
