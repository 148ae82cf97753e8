"""A service outside, for tests: a real HTTP server on this machine that answers as it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Asked:
    """A request as it came; header names in lower case."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None
    """The reply waits for it."""


Script = Callable[[Asked], Reply]


@dataclass
class StubHttpServer:
    """``script`` is asked for each reply, on a thread of the request's own."""

    url: str
    script: Script
    asked: list[Asked] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def reply(self, asked: Asked) -> Reply:
        with self.changed:
            self.asked.append(asked)
            self.changed.notify_all()
        return self.script(asked)

    def wait(self, done: int | Callable[[list[Asked]], bool], seconds: float = 30.0) -> list[Asked]:
        """The requests, once there are ``done`` of them, or it says so. Raises TimeoutError."""
        enough = done if callable(done) else lambda asked: len(asked) >= done
        with self.changed:
            if not self.changed.wait_for(lambda: enough(self.asked), seconds):
                raise TimeoutError(f"{len(self.asked)} requests came, and not what was waited for")
            return list(self.asked)


def in_turn(*replies: Reply) -> Script:
    """One reply after the other; the last one again and again."""
    left = list(replies)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


@contextmanager
def stub_http_server(script: Script, port: int = 0) -> Iterator[StubHttpServer]:
    """Serves while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name is the base's
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = service.reply(Asked(self.path, headers, body))
            if reply.hold is not None:
                reply.hold.wait()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        service = StubHttpServer(f"http://127.0.0.1:{server.server_address[1]}", script)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()
