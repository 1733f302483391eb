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

    sent: str = field(repr=False)  # a URL, or a file in base64; perhaps neither
    kind: str = "image"  # the type of its part, for errors, as the next
    place: str = ""
    is_new: bool = True  # of the last message

    @property
    def mark(self) -> str:
        """The mark. A text that contains it stands for the same picture, so nobody gains by forging it."""
        digest = hashlib.blake2b(self.sent.encode(errors="replace"), digest_size=16)
        return f"[picture {digest.hexdigest()}]"

    @property
    def left_out(self) -> str:
        """The text in place of a picture that is not shown."""
        return f"[{self.kind} left out: not text]"

    def decoded(self) -> bytes:
        """Return the bytes of the file; PromptError if nothing is sent in base64."""
        if self.sent[:8].lower().startswith(("http://", "https://")):
            raise PromptError("pictures are not fetched from the network; send a data URL")
        found = _DATA_URL.match(self.sent[:200])
        try:
            return base64.b64decode(self.sent[found.end() :] if found else self.sent, validate=True)
        except (binascii.Error, ValueError):
            raise PromptError("a picture must be base64 or a data URL with base64") from None
