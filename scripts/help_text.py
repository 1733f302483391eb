"""What a script says of itself, in its `-h`."""

from __future__ import annotations

import re


def help_text(documentation: str | None) -> str:
    """A docstring for click: paragraphs flow, indented commands stay as they are written."""
    return re.sub(r"\n\n(?= {4})", "\n\n\b\n", documentation or "")
