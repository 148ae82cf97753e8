"""The generated files of the tree, and what differs from them."""

from __future__ import annotations

from pathlib import Path

from dashboards.grafana import dashboard_json
from dashboards.metrics_page import metrics_page
from dashboards.overview import BOARDS
from rollmill.runtime.telemetry.metrics import MOST_SERIES

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("charts/rollmill/dashboards")


def expected() -> dict[Path, str]:
    """Every generated file, by its path below the root, with the text it must have."""
    boards = {FOLDER / f"{name}.json": dashboard_json(board) for name, board in BOARDS.items()}
    return {**boards, Path("docs/metrics.md"): metrics_page(MOST_SERIES)}


def write(root: Path = ROOT) -> list[Path]:
    """Write what differs; returns the paths written."""
    written = []
    for path, text in expected().items():
        file = root / path
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            written.append(path)
    return written
