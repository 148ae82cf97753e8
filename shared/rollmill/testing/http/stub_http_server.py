"""An outside service for tests: a real HTTP server on this machine with scripted replies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class StubRequest:
    """A request as it was received; header names in lower case."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class StubReply:
    status: int = 200
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None
    """The reply is sent once it is set."""


StubScript = Callable[[StubRequest], StubReply]


@dataclass
class StubHttpServer:
    """Calls ``script`` for each reply, on a thread for each request."""

    url: str
    script: StubScript
    requests: list[StubRequest] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def reply(self, request: StubRequest) -> StubReply:
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()
        return self.script(request)

    def wait(self, done: int | Callable[[list[StubRequest]], bool], seconds: float = 30.0) -> list[StubRequest]:
        """The requests, once there are ``done`` of them, or ``done`` returns True. Raises TimeoutError."""
        enough = done if callable(done) else lambda requests: len(requests) >= done
        with self.changed:
            if not self.changed.wait_for(lambda: enough(self.requests), seconds):
                raise TimeoutError(f"{len(self.requests)} requests were received, and the condition is not met")
            return list(self.requests)


def in_turn(*replies: StubReply) -> StubScript:
    """The replies in this order; the last one is repeated."""
    left = list(replies)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


@contextmanager
def stub_http_server(script: StubScript, port: int = 0) -> Iterator[StubHttpServer]:
    """Serves while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name is the base's
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = service.reply(StubRequest(self.path, headers, body))
            if reply.hold is not None:
                reply.hold.wait()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

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
