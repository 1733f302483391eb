"""Clients as packages, each installed into a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal, NamedTuple

INSTALL_SECONDS = 600


class Package(NamedTuple):
    """A client as a registry has it."""

    kind: Literal["pip", "npm"]
    name: str
    version: str
    newest_python: tuple[int, int] | None = None

    @property
    def spec(self) -> str:
        """As the registry's program takes it."""
        return f"{self.name}{'==' if self.kind == 'pip' else '@'}{self.version}"


class NotInstalledError(Exception):
    """A client cannot be installed here; the message says why."""


def install(package: Package, folder: Path) -> Path:
    """The folder whose `bin` has the programs of a client; it is made where it is not there yet."""
    into = folder / package.spec.replace("/", "-")
    done = into / ".installed"
    if done.exists():
        return into
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    if package.kind == "npm":
        if shutil.which("npm") is None:
            raise NotInstalledError("npm is not here; install Node.js")
        _install("npm", "install", "--no-audit", "--no-fund", "--prefix", into, package.spec)
        (into / "bin").symlink_to(into / "node_modules" / ".bin")
    else:
        python = sys.executable
        if package.newest_python is not None and sys.version_info[:2] > package.newest_python:
            name = ".".join(map(str, package.newest_python))
            python = shutil.which(f"python{name}") or ""
            if not python:
                raise NotInstalledError(f"it needs Python {name} or older")
        _install(python, "-m", "venv", into)
        _install(into / "bin" / "pip", "install", "--disable-pip-version-check", package.spec)
    done.touch()
    return into


def _install(*command: str | Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"{Path(command[0]).name} took more than {INSTALL_SECONDS} s") from error
    if done.returncode:
        raise NotInstalledError(done.stderr.strip()[-200:])
