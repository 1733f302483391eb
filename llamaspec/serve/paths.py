"""Paths as clients make them from a base URL: without `/v1`, with it twice, with doubled or final slashes.

Such a path means the one endpoint that it can mean. tests/serve/test_status.py.
"""

from __future__ import annotations

from collections.abc import Set

from starlette.types import ASGIApp, Receive, Scope, Send

VERSION = "/v1"
MODEL = f"{VERSION}/models/"  # the name of a model follows


def with_plain_paths(app: ASGIApp, known: Set[str]) -> ASGIApp:
    """Return middleware that replaces a path by the known one that it means."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "path": plain_path(scope["path"], known)}, receive, send)

    return answer


def plain_path(path: str, known: Set[str]) -> str:
    """Return the known path that a path means, or the path itself if it means none."""
    if path in known:
        return path
    plain = f"/{'/'.join(filter(None, path.split('/')))}"
    rest = plain
    while rest.startswith(f"{VERSION}/"):
        rest = rest.removeprefix(VERSION)
    candidates = (plain, f"{VERSION}{rest}", rest)
    return next((each for each in candidates if each in known or each.startswith(MODEL)), path)
