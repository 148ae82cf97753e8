"""One JSON object per log line, with session, task, topic and offset where there are any."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog
from aiokafka.errors import KafkaError

MOST_TEXTS = 1000
"""Of which repeats are counted."""

SECRET = re.compile(r"password|secret|api_?key|authorization|(^|_)token$", re.IGNORECASE)


def configure_logging(*, service: str, level: str, as_json: bool) -> None:
    """Route structlog and the standard library (Kafka clients, HTTP server) through one renderer to stderr."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        redact_secrets,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(is_relevant)
    handler.addFilter(Repeats())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("aiokafka").setLevel(max(logging.WARNING, root.level))
    logging.getLogger("httpx").setLevel(max(logging.WARNING, root.level))
    structlog.contextvars.bind_contextvars(service=service)


@dataclass
class _Seen:
    since: float
    passed: int = 0
    left_out: int = 0


class Repeats(logging.Filter):
    """Passes the same message of a library ``most`` times in ``seconds``, and adds the number of others to the next.

    The same message is the same text before its arguments are put in: a client without its broker logs hundreds of
    lines a second about one node or another. Rollmill's own events all pass.
    """

    def __init__(self, most: int = 5, seconds: float = 30.0, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most = most
        self._seconds = seconds
        self._now = now
        self._seen: dict[tuple[str, int, str], _Seen] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not isinstance(record.msg, str):
            return True  # an event of structlog
        name, now = (record.name, record.levelno, record.msg), self._now()
        seen = self._seen.pop(name, None)
        if seen is None or now >= seen.since + self._seconds:
            if seen is not None and seen.left_out:
                record.msg = f"{record.getMessage()} [{seen.left_out} more like this in {now - seen.since:.0f} s]"
                record.args = ()
            seen = _Seen(now)
        self._keep(name, seen)
        if seen.passed >= self._most:
            seen.left_out += 1
            return False
        seen.passed += 1
        return True

    def _keep(self, name: tuple[str, int, str], seen: _Seen) -> None:
        """The texts that came least recently go first: some libraries put their arguments in themselves."""
        self._seen[name] = seen
        if len(self._seen) > MOST_TEXTS:
            del self._seen[next(iter(self._seen))]


def is_relevant(record: logging.LogRecord) -> bool:
    """False for failures of futures that aiokafka keeps to itself: the caller of the same call gets the error."""
    error = record.exc_info[1] if record.exc_info else None
    never_retrieved = record.name == "asyncio" and "exception was never retrieved" in str(record.msg)
    return not (never_retrieved and isinstance(error, KafkaError))


def redact_secrets(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Secrets never reach a log line, whoever logs them."""
    return {key: "***" if SECRET.search(key) else value for key, value in event.items()}
