"""The embedded broker for code without an event loop: test fixtures, commands, benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rollmill.runtime.kafka.embedded.broker import EmbeddedKafka
from rollmill.runtime.kafka.embedded.config import BrokerConfig


@contextmanager
def running_kafka(data_directory: Path, config: BrokerConfig | None = None) -> Iterator[EmbeddedKafka]:
    """A broker that is ready inside the block and stopped cleanly after it."""
    kafka = EmbeddedKafka(data_directory, config)
    run_blocking(kafka.start())
    try:
        yield kafka
    finally:
        run_blocking(kafka.stop())


def run_blocking(work: Coroutine[None, None, None]) -> None:
    """Run to the end on a loop of its own, in a thread of its own: the caller's thread may have a loop already."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()
