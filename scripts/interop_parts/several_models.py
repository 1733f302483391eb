"""Clients of a server with two models, one of them loaded at a time: each lists, loads, uses, unloads them.

Open WebUI is replayed as plain HTTP: the requests of its connections to Ollama and to OpenAI's API.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from interop_parts.trial import Result
from llamaspec.measure.served_arms import PLAIN, own_arms, serving
from llamaspec.pair import demo_draft, demo_target
from serve_soak import TEMPLATE

NAMES = ("one", "two")
TAGGED = ("one:latest", "two:latest")  # as Ollama lists them
SECONDS = 60.0
N = 4  # tokens of an answer
MESSAGES: Any = [{"role": "user", "content": "def f(x):"}]
Drive = Callable[[str], Iterator[tuple[str, bool]]]  # receives the URL; yields each check and its result


@contextmanager
def server_of_two() -> Iterator[str]:
    """Run a server with two models; yield its URL."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "chat.jinja"
        template.write_text(TEMPLATE)
        paths = zip(NAMES, (demo_target(), demo_draft()), strict=True)
        options = [f"--target={name}={path}" for name, path in paths]
        options += ["--models-max", "1", "--n-ctx", "1024", "--chat-template", str(template)]
        (arm,) = (each for each in own_arms(options, (), None) if each.name == PLAIN)
        with serving([arm]) as servers:
            yield str(servers[PLAIN].client.base_url).rstrip("/")


def results_of(client: str, url: str) -> Iterator[Result]:
    """Yield the result of each check of a client."""
    package, drive = SEVERAL[client]
    try:
        importlib.import_module(package)
    except ImportError:
        yield Result("several models", "skipped", f"{package} is not installed")
        return
    try:
        for check, is_right in drive(url):
            yield Result(check, "ok" if is_right else "failed")
    except Exception as error:  # noqa: BLE001  # clients have exceptions of their own
        yield Result("several models", "failed", f"{type(error).__name__}: {error}"[:200])


def loaded(url: str) -> list[str]:
    """Return the loaded models."""
    listed = httpx.get(f"{url}/v1/models", timeout=SECONDS).json()["data"]
    return [each["id"] for each in listed if each["status"]["value"] == "loaded"]


def openai(url: str) -> Iterator[tuple[str, bool]]:
    """Check OpenAI's package; its requests load, and those to another model unload."""
    package: Any = importlib.import_module("openai")
    with package.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
        yield "lists", [each.id for each in client.models.list()] == [*NAMES]
        for name in NAMES:
            answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=N)
            yield f"uses {name}", answer.model == name and answer.usage.completion_tokens == N
            state = client.models.retrieve(name).model_extra["status"]["value"]
            yield f"loads {name}, unloads others", state == "loaded" and loaded(url) == [name]
        try:
            client.chat.completions.create(model="three", messages=MESSAGES, max_tokens=N)
        except package.NotFoundError as error:
            yield "learns which there are", all(name in str(error) for name in NAMES)


def anthropic(url: str) -> Iterator[tuple[str, bool]]:
    """Check Anthropic's package in the same way."""
    package: Any = importlib.import_module("anthropic")
    with package.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=SECONDS) as client:
        yield "lists", [each.id for each in client.models.list()] == [*NAMES]
        for name in NAMES:
            answer = client.messages.create(model=name, messages=MESSAGES, max_tokens=N)
            yield f"uses {name}", answer.model == name and answer.usage.output_tokens == N
            yield f"loads {name}, unloads others", loaded(url) == [name]


def ollama(url: str) -> Iterator[tuple[str, bool]]:
    """Check Ollama's package, which loads and unloads models without a message."""
    client: Any = importlib.import_module("ollama").Client(host=url, timeout=SECONDS)
    yield "lists", [each.model for each in client.list().models] == [*TAGGED]
    for name in TAGGED:
        yield f"loads {name}", client.generate(name, keep_alive="5m").done_reason == "load"
        yield f"sees {name} loaded", [each.model for each in client.ps().models] == [name]
        parts = [*client.chat(name, messages=MESSAGES, options={"num_predict": N}, stream=True)]
        yield f"uses {name}", parts[-1].eval_count == N
        yield f"unloads {name}", client.generate(name, keep_alive=0).done_reason == "unload"
        yield f"sees {name} unloaded", not client.ps().models


def llm_ollama(url: str) -> Iterator[tuple[str, bool]]:
    """Check `llm` with its plugin for Ollama, which can load no model without a message."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "LLM_USER_PATH": folder, "OLLAMA_HOST": url}

        def said(*arguments: str) -> str:
            command = [sys.executable, "-m", "llm", *arguments]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env=env,
                timeout=SECONDS,
                stdin=subprocess.DEVNULL,
                check=True,
            )
            return done.stdout

        listed = said("models", "list")
        yield "lists", all(f"Ollama: ollama/{name}" in listed for name in TAGGED)
        for name in TAGGED:
            answer = said("-m", f"ollama/{name}", "--no-log", "-o", "num_predict", str(N), "def f(x):")
            yield f"uses {name}", bool(answer.strip())
            yield f"loads {name}, unloads others", loaded(url) == [name.partition(":")[0]]


def open_webui(url: str) -> Iterator[tuple[str, bool]]:
    """Send what Open WebUI sends."""
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        yield "asks for the version", bool(client.get("/api/version").json()["version"])
        yield "lists", [each["model"] for each in client.get("/api/tags").json()["models"]] == [*TAGGED]
        for name in TAGGED:  # it adds the tag, and looks the name up in the list
            options = {"num_predict": N, "num_ctx": 2048}
            chat = {"model": name, "messages": MESSAGES, "stream": True, "options": options}
            *_, last = client.post("/api/chat", json=chat).text.splitlines()
            yield f"uses {name}", json.loads(last)["eval_count"] == N
            running = client.get("/api/ps").json()["models"]
            yield f"sees {name} loaded", [each["name"] for each in running] == [name]
            unload = {"model": name, "keep_alive": 0, "prompt": ""}
            client.post("/api/generate", json=unload).raise_for_status()
            yield f"unloads {name}", not client.get("/api/ps").json()["models"]
        listed = client.get("/v1/models").json()["data"]
        yield "lists by OpenAI's API", [each["id"] for each in listed] == [*NAMES]
        talk = {"model": "two", "messages": MESSAGES, "stream": True, "max_tokens": N}
        answer = client.post("/v1/chat/completions", json=talk)
        yield "uses two by OpenAI's API", answer.text.rstrip().endswith("data: [DONE]")


SEVERAL: dict[str, tuple[str, Drive]] = {  # the package that each needs
    "openai": ("openai", openai),
    "anthropic": ("anthropic", anthropic),
    "ollama": ("ollama", ollama),
    "llm-ollama": ("llm_ollama", llm_ollama),
    "open-webui": ("httpx", open_webui),
}
