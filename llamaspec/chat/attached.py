"""Pictures as clients send them, and the marks that stand for them in the text of a message."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, field

from llamaspec.errors import PromptError

_DATA_URL = re.compile(r"data:[\w.+/-]*(;[\w=.+-]+)*;base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Attached:
    """A picture as a client has sent it, and the mark that stands for it in the text."""

    data: bytes = field(repr=False)  # of a file
    kind: str = "image"  # the type of its part, for errors, as the next
    place: str = ""
    is_new: bool = True  # of the last message

    @property
    def mark(self) -> str:
        """The mark. A text that contains it stands for the same picture, so nobody gains by forging it."""
        return f"[picture {hashlib.blake2b(self.data, digest_size=16).hexdigest()}]"

    @property
    def left_out(self) -> str:
        """The text in place of the picture for a model that sees none."""
        return f"[{self.kind} left out: not text]"


def decoded_base64(text: str) -> bytes:
    """Return the bytes of a data URL or of plain base64; PromptError if it is neither."""
    if text[:8].lower().startswith(("http://", "https://")):
        raise PromptError("pictures are not fetched from the network; send a data URL")
    found = _DATA_URL.match(text[:200])
    try:
        return base64.b64decode(text[found.end() :] if found else text, validate=True)
    except (binascii.Error, ValueError):
        raise PromptError("a picture must be base64 or a data URL with base64") from None
