"""Whether two models number the same tokens, and if not, where they first differ."""

from __future__ import annotations

from llamaspec.errors import PairError
from llamaspec.llama.vocabulary import LlamaVocabulary

MAX_SIZE_DIFFERENCE = 128  # unused entries at the end of a vocabulary, as llama.cpp allows them


def check_pair(target: LlamaVocabulary, draft: LlamaVocabulary) -> None:
    """Refuse another vocabulary where token ids are exchanged: the same id must mean the same text.

    Raises
    ------
    PairError
        Names the first differing token id and both texts.
    """
    found = difference(target, draft)
    if found is not None:
        message = f"target and draft have different vocabularies: {found}"
        raise PairError(f"{message}; choose a draft of the same model family")


def difference(target: LlamaVocabulary, draft: LlamaVocabulary) -> str | None:
    """Where two vocabularies first differ; None where all ids mean the same."""
    for token in range(min(target.size, draft.size)):
        if target.text(token) != draft.text(token):
            shown = _shown(target, token), _shown(draft, token)
            return f"token {token} is {shown[0]} in the target and {shown[1]} in the draft"
    if abs(target.size - draft.size) <= MAX_SIZE_DIFFERENCE:
        return None
    shorter, longer = sorted((target, draft), key=lambda vocabulary: vocabulary.size)
    longer_name = "target" if longer is target else "draft"
    return (
        f"{target.size} and {draft.size} tokens; token {shorter.size} is "
        f"{_shown(longer, shorter.size)} in the {longer_name} only"
    )


def _shown(vocabulary: LlamaVocabulary, token: int) -> str:
    return repr(vocabulary.text(token).decode("utf-8", errors="replace"))
