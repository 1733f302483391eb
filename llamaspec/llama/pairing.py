"""Whether two models number the same tokens, and if not, where they first differ."""

from __future__ import annotations

from llamaspec.errors import PairError
from llamaspec.llama.vocabulary import LlamaVocabulary

MAX_SIZE_DIFFERENCE = 128  # unused entries at the end of a vocabulary, as llama.cpp allows them


def check_pair(target: LlamaVocabulary, draft: LlamaVocabulary) -> None:
    """Refuse a draft of another vocabulary.

    Draft tokens are token ids, so the same id must mean the same text in both models.

    Raises
    ------
    PairError
        Names the first differing token id and both texts.
    """
    remedy = "choose a draft of the same model family"
    for token in range(min(target.size, draft.size)):
        if target.text(token) != draft.text(token):
            raise PairError(
                f"target and draft have different vocabularies: token {token} is {_shown(target, token)} "
                f"in the target and {_shown(draft, token)} in the draft; {remedy}"
            )
    if abs(target.size - draft.size) > MAX_SIZE_DIFFERENCE:
        shorter, longer = sorted((target, draft), key=lambda vocabulary: vocabulary.size)
        longer_name = "target" if longer is target else "draft"
        raise PairError(
            f"target and draft have different vocabularies: {target.size} and {draft.size} tokens; token "
            f"{shorter.size} is {_shown(longer, shorter.size)} in the {longer_name} only; {remedy}"
        )


def _shown(vocabulary: LlamaVocabulary, token: int) -> str:
    return repr(vocabulary.text(token).decode("utf-8", errors="replace"))
