"""A server without a model. It answers every chat request with the same words."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any


def serve(words: list[str], seconds_per_word: float = 0.0) -> None:
    """Serve on the port of --port until the process ends."""
    if "--version" in sys.argv:
        sys.stderr.write("version: 77 (abc)\n")
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for word in words:
                time.sleep(seconds_per_word)
                self._event({"choices": [{"delta": {"content": word}}]})
            self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(words)}})

        def _event(self, event: Any) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

        def log_message(self, *_: Any) -> None: ...

    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()


def write_program(path: Path, words: list[str], seconds_per_word: float = 0.0) -> Path:
    """Write a program that runs such a server with any arguments."""
    folder = Path(__file__).parent
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(folder)!r})\n"
        f"from fake_server import serve\nserve({words!r}, {seconds_per_word})\n"
    )
    path.chmod(0o755)
    return path


def write_checkout(folder: Path, words: list[str]) -> Path:
    """Write a folder that looks like a checkout of llamaspec and runs such a server."""
    package = folder / "llamaspec"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    write_program(package / "program.py", words)
    code = f"import runpy\n\n\ndef main():\n    runpy.run_path({str(package / 'program.py')!r})\n"
    (package / "__main__.py").write_text(code)
    return folder
