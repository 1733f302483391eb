"""One self-contained page that shows every round of a text: its time, its draft tokens, what was accepted.

The page is a template beside this file; the data go into it as JSON, so that no text can break the page.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from llamaspec.engine.events import Completion
from llamaspec.errors import LlamaspecError, printable
from llamaspec.protocols import Vocabulary
from llamaspec.values import Round, Source


def check_timeline(path: Path) -> None:
    """Refuse, before anything is loaded, a file that cannot be written.

    Raises
    ------
    LlamaspecError
        There is no such folder, it is one, or writing is not allowed.
    """
    if not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    elif path.is_dir():
        reason = "it is a folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "writing there is not allowed"
    else:
        return
    raise LlamaspecError(f"cannot write the timeline {path}: {reason}; name a writable file")


def write_timeline(path: Path, completion: Completion, vocabulary: Vocabulary, summary: str) -> None:
    """Write the page.

    Raises
    ------
    LlamaspecError
        The file cannot be written.
    """
    data = {
        "summary": summary,
        "conclusion": conclusion(completion),
        "prompt": {"n_tokens": completion.n_prompt_tokens, "seconds": completion.prefill_seconds},
        "n_tokens": completion.summary.n_tokens,
        "plain": completion.summary.plain_seconds,
        "rounds": [_round(round_, vocabulary) for round_ in completion.rounds],
    }
    template = (files("llamaspec") / "cli" / "timeline.html").read_text(encoding="utf-8")
    page = template.replace("@DATA@", json.dumps(data).replace("<", "\\u003c"))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise LlamaspecError(
            f"cannot write the timeline {path}: {error.strerror or error}; name a writable file"
        ) from error


def conclusion(completion: Completion) -> str:
    """What the drafts were worth in this text, in one sentence."""
    summary = completion.summary
    if not summary.n_drafted:
        return "Nothing was drafted: this is plain decoding."
    if summary.speed_up is None:
        return "Every round had a draft, so this run does not tell what plain decoding takes."
    share = 1 / summary.speed_up
    if share <= 1:
        return f"With the drafts this text took {share:.0%} of the time that plain decoding takes."
    return f"The drafts did not pay: this text took {share:.2f} times as long as plain decoding."


def _round(round_: Round, vocabulary: Vocabulary) -> dict[str, Any]:
    draft = zip(round_.draft.tokens.tolist(), round_.confidences, range(len(round_.draft)), strict=True)
    return {
        "draft": round_.draft_seconds,
        "verify": round_.verify_seconds,
        "rest": round_.overhead_seconds,
        "accepted": round_.n_accepted,
        "verified": round_.n_verified,
        "copied": round_.source in (Source.NGRAM, Source.STORE),
        "drafted": [
            {
                "text": _text(token, vocabulary),
                "confidence": confidence,
                "parent": round_.draft.parent(i),
                "kept": i in round_.path,
            }
            for token, confidence, i in draft
        ],
        "next": _text(round_.next_token, vocabulary),
    }


def _text(token: int, vocabulary: Vocabulary) -> str:
    """As it stands in the page: with lines and tabs, and every other control character escaped."""
    return printable(vocabulary.piece(token).decode("utf-8", errors="replace"), keep="\n\t")
