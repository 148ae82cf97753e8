"""The overview against a real Prometheus that scraped the whole pipeline while it worked."""

from __future__ import annotations

import asyncio
import math
import subprocess
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from dashboards.overview import OVERVIEW
from dashboards.panels import substituted
from dashboards.recording import Recording, recorded
from relay.display import PlainLines
from relay.options import Options
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.telemetry.catalogue import COMPONENTS, metrics_of

pytestmark = [pytest.mark.e2e, pytest.mark.kafka]

STEPS = 2
ONCE_OR_MORE = {
    "Reward, mean",
    "Staleness, mean",
    "Age from sampling to hand-over",
    "Time of commits and replies, p95",
    "Tokens trained",
}
"""Panels of quotients: they show something only where something happened."""


async def test_every_expression_of_every_panel_shows_something(
    kafka_broker: EmbeddedKafka, tmp_path: Path, prometheus: str, promtool: str
) -> None:
    options = Options(steps=STEPS, bootstrap_servers=kafka_broker.bootstrap_servers)
    display = PlainLines(Console(quiet=True))
    async with recorded(prometheus, tmp_path, options, display) as recording:
        assert set((await recording.prometheus.up()).items()) == {(name, 1.0) for name in COMPONENTS}
        await the_numbers_are_those_of_the_run(recording)
        for panel, expr in OVERVIEW.expressions():
            found = await recording.newest(expr)
            assert found, f"{panel.title}: {expr}"
            values = [value for series in found for _, value in series.points]
            assert panel.title not in ONCE_OR_MORE or any(map(math.isfinite, values)), f"{panel.title}: {expr}"
        await everything_of_the_catalogue_is_exported(recording, promtool)


async def everything_of_the_catalogue_is_exported(recording: Recording, promtool: str) -> None:
    async with httpx.AsyncClient() as http:
        for component, address in recording.targets.items():
            page = (await http.get(f"http://{address}/metrics")).content
            assert await asyncio.to_thread(complaints, promtool, page) == "", component
            exported = {line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE ")}
            assert exported == {metric.full_name for metric in metrics_of(component).values()}, component


def complaints(promtool: str, page: bytes) -> str:
    done = subprocess.run((promtool, "check", "metrics"), input=page, capture_output=True, check=False)
    return (done.stdout + done.stderr).decode() or (f"exit code {done.returncode}" if done.returncode else "")


async def the_numbers_are_those_of_the_run(recording: Recording) -> None:
    total = recording.played.balance.total
    assert await one(recording, 'rollmill_ledger_tokens{prefix="$prefix", fate="trained"}') == total.trained > 0
    assert await one(recording, 'rollmill_ledger_captured_tokens{prefix="$prefix"}') == total.captured
    assert await one(recording, 'sum(rollmill_ledger_imbalance_tokens{prefix="$prefix"})') == 0
    assert await one(recording, 'sum(rollmill_undeclared_metrics_total{prefix="$prefix"})') == 0
    sessions = 'rollmill_stage_events_total{prefix="$prefix", component="builder", event="sessions_closed"}'
    await comes_to(recording, sessions, len(recording.played.record))
    cut, handed_over = (f'rollmill_age_at_{when}_seconds_count{{prefix="$prefix"}}' for when in ("cut", "hand_over"))
    rollouts = await one(recording, cut)
    assert rollouts >= 64
    await comes_to(recording, handed_over, rollouts)


async def comes_to(recording: Recording, expr: str, wanted: float) -> None:
    """A stage counts after its commit, so the end of the run, which is read from the log, can be a moment earlier."""
    await recording.prometheus.until(f"{substituted(expr, recording.variables())} == {wanted}")


async def one(recording: Recording, expr: str) -> float:
    found = await recording.newest(expr)
    assert len(found) == 1, expr
    return found[0].points[0][1]
