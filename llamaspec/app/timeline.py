"""One self-contained page that shows every round of a text: its time, its guesses, what stood.

The page is a template beside this file; the data go into it as JSON, so that no text can break the page.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from llamaspec.engine.generate import Completion
from llamaspec.errors import LlamaspecError
from llamaspec.protocols import Vocabulary
from llamaspec.values import Round


def write_timeline(path: Path, completion: Completion, vocabulary: Vocabulary, summary: str) -> None:
    """Write the page.

    Raises
    ------
    LlamaspecError
        The file cannot be written.
    """
    data = {"summary": summary, "rounds": [_round(round_, vocabulary) for round_ in completion.rounds]}
    template = (files("llamaspec") / "app" / "timeline.html").read_text(encoding="utf-8")
    page = template.replace("@DATA@", json.dumps(data).replace("<", "\\u003c"))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise LlamaspecError(f"cannot write the timeline {path}: {error.strerror or error}") from error


def _round(round_: Round, vocabulary: Vocabulary) -> dict[str, Any]:
    guesses = zip(round_.drafted.tolist(), round_.confidences, strict=True)
    return {
        "draft": round_.draft_seconds,
        "verify": round_.verify_seconds,
        "rest": round_.rest_seconds,
        "accepted": round_.n_accepted,
        "verified": round_.n_verified,
        "copied": round_.is_copy,
        "guesses": [
            {"text": _text(token, vocabulary), "confidence": confidence} for token, confidence in guesses
        ],
        "next": _text(round_.next_token, vocabulary),
    }


def _text(token: int, vocabulary: Vocabulary) -> str:
    return vocabulary.piece(token).decode("utf-8", errors="replace")
