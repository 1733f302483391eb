"""Pictures of a conversation: their marks in its text, and their pixels.

Clients' bytes are decoded by Pillow only, in memory, and never before the number of pixels is known.
tests/serve/test_pictures.py.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

import numpy as np

from llamaspec.chat.template import Rendered
from llamaspec.errors import PromptError
from llamaspec.llama.pictures import Picture, Pixels, Projector
from llamaspec.values import TokenArray

MAX_PIXELS = 64 << 20  # of one picture: 192 MiB as RGB
MAX_ALL_PIXELS = 2 * MAX_PIXELS  # of a conversation
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


def pixels_of(data: bytes, n_left: int = MAX_ALL_PIXELS) -> Pixels:
    """Return the pixels of a picture file, upright: [height, width, 3].

    PromptError if it is none, or has more pixels than one may have or than are left for it. An animation
    gives its first frame; transparent parts are white.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise PromptError("pictures need Pillow: pip install 'llamaspec[serve]'") from None
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise PromptError(
                    f"a picture of {width} x {height} pixels is too large; at most {MAX_PIXELS}"
                )
            if width * height > n_left:
                raise PromptError(
                    f"the pictures have more than {MAX_ALL_PIXELS} pixels; send fewer or smaller ones"
                )
            image.seek(0)
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith(("I", "F")):  # 16 bits, or more
                deep = np.asarray(upright, dtype=np.float64)
                top = 65535.0 if deep.max(initial=0) > 255 else 255.0
                upright = Image.fromarray((deep.clip(0, top) * (255 / top)).astype(np.uint8))
            if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
                upright = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
            pixels: Pixels = np.asarray(upright.convert("RGB"), dtype=np.uint8)
            return pixels
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        kinds = "PNG, JPEG, WebP, GIF, BMP or TIFF"
        raise PromptError(f"a picture cannot be read; send {kinds}") from error
    except (OSError, SyntaxError, ValueError, EOFError, ArithmeticError, KeyError) as error:
        raise PromptError(f"a picture is damaged: {error}") from error


def tokenize(
    rendered: Rendered, pixels: Mapping[str, Pixels], projector: Projector, most: int
) -> tuple[TokenArray, tuple[Picture, ...]]:
    """Return the tokens of a rendered conversation with pictures by their marks, and the pictures.

    PromptError if one is not for this model. A picture that it sees at once has at most `most` tokens.
    """
    shown = {mark.encode(): each for mark, each in pixels.items()}
    marks = re.compile(b"(" + b"|".join(map(re.escape, shown)) + b")")
    parts, trusted = list[bytes | Pixels](), list[bool]()
    for text, is_trusted in rendered.segments():
        for part in marks.split(text):
            if part:
                parts.append(shown.get(part, part))
                trusted.append(is_trusted)
    return projector.tokenize(parts, trusted, most)
