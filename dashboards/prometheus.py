"""A Prometheus of one's own for a while: scrapes what it is told, answers queries."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rollmill.errors import FatalError
from rollmill.runtime.supervisor import free_port

READY_SECONDS = 30.0
SEEN_SECONDS = 60.0
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Series:
    """One series of an answer: its labels, and (seconds since the epoch, value) each."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Prometheus:
    """Its HTTP API. Every question raises FatalError where the expression is wrong."""

    http: httpx.AsyncClient

    async def newest(self, expr: str) -> list[Series]:
        """The series of ``expr`` now, with one point each."""
        return [_series(row, [row["value"]]) for row in await self._ask("query", {"query": expr})]

    async def between(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        """The series of ``expr`` from ``start`` to ``end``, seconds since the epoch, every ``step`` seconds."""
        asked = {"query": expr, "start": str(start), "end": str(end), "step": str(step)}
        return [_series(row, row["values"]) for row in await self._ask("query_range", asked)]

    async def up(self) -> dict[str, float]:
        """By job, whether its last scrape worked: 1 or 0."""
        return {series.labels["job"]: series.points[-1][1] for series in await self.newest("up")}

    async def until(self, expr: str, series: int = 1) -> list[Series]:
        """Return once ``expr`` has so many series. Raises FatalError where it never does."""
        try:
            async with asyncio.timeout(SEEN_SECONDS):
                while True:
                    found = await self.newest(expr)
                    if len(found) >= series:
                        return found
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise FatalError(f"in {SEEN_SECONDS:g} s Prometheus has not seen {series} series of {expr}") from error

    async def _ask(self, what: str, asked: Mapping[str, str]) -> list[dict[str, Any]]:
        answer = (await self.http.get(f"/api/v1/{what}", params=dict(asked))).json()
        if answer["status"] != "success":
            raise FatalError(f"Prometheus does not understand {asked['query']}: {answer.get('error')}")
        rows: list[dict[str, Any]] = answer["data"]["result"]
        return rows


@asynccontextmanager
async def running_prometheus(
    program: str, directory: Path, targets: Mapping[str, str], scrape_seconds: int = 1
) -> AsyncIterator[Prometheus]:
    """Scrapes ``targets`` (``host:port`` by job) until the end of the block; its data lies below ``directory``."""
    config, port = _written(directory, targets, scrape_seconds), free_port()
    options = ("--config.file", str(config), "--storage.tsdb.path", str(directory / "data"))
    with (directory / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program, *options, f"--web.listen-address=127.0.0.1:{port}", stdin=DEVNULL, stdout=log, stderr=log
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            await _ready(process, http, directory / "prometheus.log")
            yield Prometheus(http)
    finally:
        await _ended(process)


def _written(directory: Path, targets: Mapping[str, str], scrape_seconds: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "prometheus.json"
    config.write_text(json.dumps(_config(targets, scrape_seconds)), encoding="utf-8")  # JSON is YAML
    return config


def _config(targets: Mapping[str, str], scrape_seconds: int) -> dict[str, Any]:
    jobs = [{"job_name": job, "static_configs": [{"targets": [address]}]} for job, address in targets.items()]
    return {"global": {"scrape_interval": f"{scrape_seconds}s"}, "scrape_configs": jobs}


async def _ready(process: Process, http: httpx.AsyncClient, log: Path) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            if process.returncode is not None:
                raise FatalError(f"Prometheus ended with {process.returncode}, see {log}")
            try:
                if (await http.get("/-/ready")).is_success:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


async def _ended(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def _series(row: dict[str, Any], values: list[tuple[float, str]]) -> Series:
    return Series(row["metric"], tuple((float(at), float(value)) for at, value in values))
