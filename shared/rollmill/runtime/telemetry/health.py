"""/live, /ready and /metrics from a thread of their own, so that a busy event loop still answers (rule C5)."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rollmill.models import dump_json
from rollmill.runtime.telemetry.metrics import Metrics

JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Health:
    """Readiness by named parts: ready when every expected part is. ``fail`` takes /live down for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, bool] = {}
        self._failure: str | None = None
        self._notes: dict[str, str] = {}

    def expect(self, part: str) -> None:
        with self._lock:
            self._parts.setdefault(part, False)

    def ready(self, part: str, *, ready: bool = True) -> None:
        with self._lock:
            self._parts[part] = ready

    def note(self, about: str, text: str | None) -> None:
        """Show a fault outside in /ready, which it leaves as it is; None: it is over."""
        with self._lock:
            if text is None:
                self._notes.pop(about, None)
            else:
                self._notes[about] = text

    def fail(self, reason: str) -> None:
        with self._lock:
            self._failure = reason

    def liveness(self) -> tuple[int, dict[str, object]]:
        with self._lock:
            return (200, {"live": True}) if self._failure is None else (503, {"live": False, "why": self._failure})

    def readiness(self) -> tuple[int, dict[str, object]]:
        with self._lock:
            waiting = sorted(part for part, ready in self._parts.items() if not ready)
            good = not waiting and self._failure is None and bool(self._parts)
            notes = {"notes": dict(self._notes)} if self._notes else {}
            return (200 if good else 503, {"ready": good, "waiting": waiting, **notes})


class HealthServer:
    """Serves one `Health` and one `Metrics` on a daemon thread; ``port`` 0 takes a free one."""

    def __init__(self, health: Health, metrics: Metrics, host: str, port: int) -> None:
        self._server = ThreadingHTTPServer((host, port), _handler(health, metrics))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def _handler(health: Health, metrics: Metrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content_type, body = self._answer()
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _answer(self) -> tuple[int, str, bytes]:
            if self.path == "/live":
                status, body = health.liveness()
                return status, JSON, dump_json(body)
            if self.path == "/ready":
                status, body = health.readiness()
                return status, JSON, dump_json(body)
            if self.path == "/metrics":
                return 200, PROMETHEUS, metrics.exposition()
            return 404, JSON, dump_json({"error": "try /live, /ready or /metrics"})

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
            """Probes come every few seconds: not logged."""

    return Handler
