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
from llamaspec.errors import LlamaspecError
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
    data = {"summary": summary, "rounds": [_round(round_, vocabulary) for round_ in completion.rounds]}
    template = (files("llamaspec") / "cli" / "timeline.html").read_text(encoding="utf-8")
    page = template.replace("@DATA@", json.dumps(data).replace("<", "\\u003c"))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise LlamaspecError(
            f"cannot write the timeline {path}: {error.strerror or error}; name a writable file"
        ) from error


def _round(round_: Round, vocabulary: Vocabulary) -> dict[str, Any]:
    draft = zip(round_.drafted.tolist(), round_.confidences, range(len(round_.draft)), strict=True)
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
    return vocabulary.piece(token).decode("utf-8", errors="replace")
