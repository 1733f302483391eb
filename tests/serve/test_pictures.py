"""Pictures in requests of every API: the model sees them, and what cannot be seen is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llamaspec import ModelOptions, open_pair
from llamaspec.chat.pictures import pixels_of
from llamaspec.errors import PromptError
from serving import Served, served
from tiny_models import write_llama
from tiny_projectors import write_projector

pil = pytest.importorskip("PIL.Image")


def file_of(seed: int, kind: str = "PNG", **options: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    content = io.BytesIO()
    pil.fromarray(pixels).save(content, kind, **options)
    return content.getvalue()


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pictures")
    model = write_llama(folder / "model.gguf")
    projector = write_projector(folder / "mmproj.gguf", "mlp")
    options = ModelOptions(n_ctx=512, threads=2, projector=projector)
    with open_pair(model, draft=None, target_options=options) as pair, served(pair, alias="sees") as found:
        yield found


def answers(server: Served, seed: int) -> list[str]:
    data = text_of(file_of(seed))
    url, ask = f"data:image/png;base64,{data}", {"type": "text", "text": "What is it?"}
    openai = [ask, {"type": "image_url", "image_url": {"url": url}}]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    plain = {"temperature": 0.0, "max_tokens": 24}

    def message(content: object, **more: object) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": content, **more}], "stream": False}

    chat = server.post("/v1/chat/completions", message(openai) | plain).json()
    assert "choices" in chat, chat
    claude = server.post("/v1/messages", message([ask, {"type": "image", "source": source}]) | plain).json()
    ollama = message("What is it?", images=[data]) | {"options": {"temperature": 0.0, "num_predict": 24}}
    llama = server.post("/api/chat", ollama | {"model": "sees"}).json()
    prompt = {"model": "sees", "prompt": "What is it?", "images": [data], "options": ollama["options"]}
    told = server.post("/api/generate", prompt | {"stream": False}).json()["response"]
    return [
        chat["choices"][0]["message"]["content"], claude["content"][0]["text"], llama["message"]["content"],
        told,
    ]  # fmt: skip


def test_every_api_shows_the_same_picture(server: Served) -> None:
    first, again, other = answers(server, 1), answers(server, 1), answers(server, 2)
    assert len({*first, *again}) == 1
    assert first[0] != other[0]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png;base64,AAAA", "cannot be read"),
        ("data:image/png;base64,*", "must be base64"),
        (f"data:image/png;base64,{text_of(file_of(1)[:900])}", "damaged"),
        ("http://127.0.0.1/picture.png", "not fetched"),
    ],
)
def test_a_picture_that_cannot_be_seen_is_refused(server: Served, url: str, said: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_unusual_files_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    grey = np.linspace(0, 65535, 6).astype(np.uint16).reshape(2, 3)
    for image, kind in [
        (pil.fromarray(grey), "PNG"), (pil.new("CMYK", (3, 2)), "JPEG"), (pil.new("P", (3, 2)), "GIF"),
        (pil.new("RGBA", (3, 2)), "PNG"),
    ]:  # fmt: skip
        content = io.BytesIO()
        image.save(content, kind)
        assert pixels_of(content.getvalue()).shape == (2, 3, 3)
    exif = pil.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert pixels_of(file_of(1, "JPEG", exif=exif)).shape == (60, 40, 3)
    monkeypatch.setattr("llamaspec.chat.pictures.MAX_PIXELS", 100)
    with pytest.raises(PromptError, match="too large"):
        pixels_of(file_of(1))
