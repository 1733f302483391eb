"""Which pictures of a request the model sees. tests/serve/test_pictures.py, tests/serve/test_histories.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamaspec.chat.messages import Message
from llamaspec.errors import PromptError
from llamaspec.serve.http_errors import bad_field, not_supported

if TYPE_CHECKING:
    from llamaspec.llama.pictures import Pixels


def shown(messages: Sequence[Message], *, sees: bool) -> tuple[list[Message], dict[str, Pixels]]:
    """Return the messages, and the pixels of their pictures by their marks.

    A remark stands for a picture that cannot be shown: clients send it again in every turn. RequestError if
    it is in the last message, and not in a tool's result. `sees` = the model sees pictures.
    """
    pixels: dict[str, Pixels] = {}
    found = [_shown(each, pixels, sees=sees) for each in reversed(messages)]  # old ones get what is left
    return found[::-1], pixels


def _shown(message: Message, pixels: dict[str, Pixels], *, sees: bool) -> Message:
    for picture in message.pictures:
        is_needed = picture.is_new and message.role != "tool"
        if not sees:
            if is_needed:
                fault = "only text is supported here, no images, audio or files"
                raise not_supported(f"{picture.place}.type", fault)
            message = message.without(picture)
        elif picture.mark not in pixels:
            from llamaspec.chat.pictures import MAX_ALL_PIXELS, pixels_of  # few models see

            n_left = MAX_ALL_PIXELS - sum(each.size // 3 for each in pixels.values())
            try:
                pixels[picture.mark] = pixels_of(picture.decoded(), n_left)
            except PromptError as error:
                if is_needed:
                    raise bad_field(picture.place, str(error)) from error
                message = message.without(picture)
    return message
