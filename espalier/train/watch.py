"""A run shown while it goes: ``espalier watch RUN``. For this machine alone.

The server listens on 127.0.0.1. It answers no request that names another host (so that no page of the web
reaches it under a name of its own), and none that comes from another page; it sends no leave to read across.
"""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from espalier.train.page import as_json, page, read_run

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Server(ThreadingHTTPServer):
    """Serves the page of a run, and what is new of it.

    Args:
        folder: of the run.
        port: 0 for a free one.

    Raises:
        ValueError: the folder is none of a run, or the port is in use.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        read_run(folder)
        self.folder = folder
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ValueError(
                f"port {port} cannot be used ({error.strerror}): give another by --port, or leave it out"
            ) from None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "espalier", ""

    def do_GET(self) -> None:
        """Answer."""
        hosts = {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") not in hosts or (
            origin is not None and urlsplit(origin).netloc not in hosts
        ):
            self._say(HTTPStatus.FORBIDDEN, "text/plain", b"for this machine's own pages alone\n")
            return
        path = urlsplit(self.path).path
        try:
            if path == "/":
                text = page([read_run(self.server.folder)], live=True)
                self._say(HTTPStatus.OK, "text/html; charset=utf-8", text.encode())
            elif path == "/data.json":
                self._say(HTTPStatus.OK, "application/json", as_json(read_run(self.server.folder)).encode())
            else:
                self._say(HTTPStatus.NOT_FOUND, "text/plain", b"there is / and /data.json\n")
        except (ValueError, OSError) as error:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error).encode())

    def _say(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        same = status is HTTPStatus.OK and self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if same else status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("ETag", tag)
        if same:
            self.end_headers()
            return
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal is the user's."""
