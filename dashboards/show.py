"""From a recorded run to pictures: one of the whole board, and one for each panel."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from dashboards.overview import OVERVIEW
from dashboards.preview import Data, Line, draw_board, draw_panel, lines
from dashboards.recording import recorded
from relay.display import PlainLines
from relay.options import Options


async def record(program: str, work: Path, steps: int, bootstrap_servers: str | None) -> Data:
    """Play the demo, with its files under ``work``; returns what Prometheus recorded for every panel."""
    options = Options(steps=steps, bootstrap_servers=bootstrap_servers)
    async with recorded(program, work, options, PlainLines(Console(stderr=True))) as recording:
        return {panel.title: lines(panel, await recording.drawn(panel), recording.start) for panel in OVERVIEW.panels()}


def save(data: Data, file: Path) -> None:
    plain = {title: [(line.name, line.points) for line in found] for title, found in data.items()}
    file.write_text(json.dumps(plain), encoding="utf-8")


def load(file: Path) -> Data:
    """What `save` wrote."""
    plain = json.loads(file.read_text(encoding="utf-8"))
    return {
        title: [Line(name, tuple((at, value) for at, value in points)) for name, points in found]
        for title, found in plain.items()
    }


def draw(data: Data, folder: Path) -> list[Path]:
    """One picture of the whole board, and one for each panel."""
    files = [folder / "overview.png", *(folder / f"{panel.slug}.png" for panel in OVERVIEW.panels())]
    draw_board(OVERVIEW, data, files[0])
    for panel, file in zip(OVERVIEW.panels(), files[1:], strict=True):
        draw_panel(panel, data[panel.title], file)
    return files
