"""Panels as pictures, from what Prometheus recorded: roughly what Grafana would show."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.gridspec import GridSpec
from PIL import Image

from dashboards.panels import GREEN, MEANINGS, Board, Form, Panel, Unit
from dashboards.prometheus import Series

COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#ff9da7", "#6b6b6b")
SHADES = {"green": "#3d9960", "orange": "#e08214", "red": "#c0392b", "blue": "#6f9bd1", "gray": "#9aa0a6"}
MOST_LINES = 9
"""Series shown of one panel, the largest first; a person reads no more."""
INCH_PER_COLUMN, INCH_PER_ROW = 0.62, 0.30
DPI = 88
PALETTE = 128
COLUMNS, LEGEND_COLUMNS = 24, 3
WRITTEN_OUT = frozenset({Unit.SHARE, Unit.SECONDS, Unit.NUMBER})
"""Units that stand at every number of an axis, if at all; others stand above it once."""
SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Line:
    """One series as drawn: its name, and points (seconds since the recording began, value)."""

    name: str
    points: tuple[tuple[float, float], ...]

    @property
    def peak(self) -> float:
        return max((abs(value) for _, value in self.points if math.isfinite(value)), default=0.0)


Data = Mapping[str, Sequence[Line]]
"""Lines by the panel's title."""


def lines(panel: Panel, answers: Sequence[Sequence[Series]], start: float) -> list[Line]:
    """The largest series of a panel, in the order of the answers; those that stay at 0 only where all do."""
    made = [
        Line(_name(target.legend, series.labels), tuple((at - start, value) for at, value in series.points))
        for target, answer in zip(panel.targets, answers, strict=True)
        for series in answer
    ]
    busy = [line for line in made if line.peak] or made[:LEGEND_COLUMNS]
    shown = sorted(busy, key=lambda line: -line.peak)[:MOST_LINES]
    return [line for line in made if line in shown]


def draw_board(board: Board, data: Data, file: Path) -> None:
    """All panels, placed as Grafana places them."""
    places = list(_places(board))
    height = max(top + panel.height for panel, _, top in places)
    figure = Figure(figsize=(COLUMNS * INCH_PER_COLUMN, height * INCH_PER_ROW), dpi=DPI, layout=None)
    grid = GridSpec(height, COLUMNS, figure=figure, left=0.0, right=1.0, bottom=0.0, top=1.0, wspace=0, hspace=0)
    for panel, left, top in places:
        cell = figure.add_subfigure(grid[top : top + panel.height, left : left + panel.width])
        _draw(cell.subplots(), panel, data[panel.title])
        _leave_room(cell, panel, len(data[panel.title]))
        cell.patch.set(edgecolor="#d9dce1", linewidth=1.0)
    _save(figure, file)


def draw_panel(panel: Panel, found: Sequence[Line], file: Path) -> None:
    figure = Figure(figsize=(panel.width * INCH_PER_COLUMN, panel.height * INCH_PER_ROW), dpi=DPI)
    _draw(figure.subplots(), panel, found)
    _leave_room(figure, panel, len(found))
    _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    """With few colours: a third of the bytes, and no difference to see."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(PALETTE).save(file, optimize=True)


def _places(board: Board) -> Iterator[tuple[Panel, int, int]]:
    """Panel, left and top in the grid: from left to right, then below; every row of the board begins anew."""
    top = 0
    for row in board.rows:
        left = lowest = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top = 0, top + lowest
            yield panel, left, top
            left, lowest = left + panel.width, panel.height
        top += lowest


def _draw(axes: Axes, panel: Panel, found: Sequence[Line]) -> None:
    axes.set_title(panel.title, loc="left", fontsize=9.5, fontweight="bold", color="#333333", pad=7)
    if panel.form is not Form.STAT and panel.unit not in WRITTEN_OUT:
        axes.set_title(panel.unit.value, loc="right", fontsize=7.5, color="#777777", pad=7)
    if panel.form is Form.STAT:
        _stat(axes, panel, found)
        return
    if panel.form is Form.STACKED:
        _stack(axes, found)
    else:
        for line, color in zip(found, _colors(found), strict=True):
            axes.plot(*_columns(line), color=color, linewidth=1.4, label=line.name)
    _limits(axes, panel, found)
    _dress(axes, panel, found)


def _stat(axes: Axes, panel: Panel, found: Sequence[Line]) -> None:
    axes.set_axis_off()
    values = [value for line in found for _, value in line.points if math.isfinite(value)]
    newest = values[-1] if values else math.nan
    color = next((color for at, color in reversed(panel.thresholds) if newest >= at), GREEN)
    text = written(newest, panel.unit)
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=21, color=SHADES[color], transform=axes.transAxes)


def _stack(axes: Axes, found: Sequence[Line]) -> None:
    """A series begins where it was first scraped; before, it is 0."""
    times = sorted({at for line in found for at, _ in line.points})
    heights = [[dict(line.points).get(at, 0.0) for at in times] for line in found]
    finite = [[value if math.isfinite(value) else 0.0 for value in row] for row in heights]
    if found:
        axes.stackplot(
            times, finite, colors=_colors(found), labels=[line.name for line in found], alpha=0.75, linewidth=0
        )


def _colors(found: Sequence[Line]) -> list[str]:
    others = cycle(COLORS)
    return [SHADES[MEANINGS[line.name]] if line.name in MEANINGS else next(others) for line in found]


def _limits(axes: Axes, panel: Panel, found: Sequence[Line]) -> None:
    """From 0, and lines that all lie at 0 have room above them; thresholds where they are in sight."""
    highest = axes.get_ylim()[1] if any(line.peak for line in found) else 1.0
    if not panel.signed:
        axes.set_ylim(0.0, highest)
    low, high = axes.get_ylim()
    for at, color in panel.thresholds:
        if low < at <= high:
            axes.axhline(at, color=SHADES[color], linewidth=0.9, linestyle=(0, (4, 3)))


def _dress(axes: Axes, panel: Panel, found: Sequence[Line]) -> None:
    unit = panel.unit if panel.unit in WRITTEN_OUT else Unit.NUMBER
    axes.yaxis.set_major_formatter(lambda value, _: written(value, unit))
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds:.0f} s")
    axes.locator_params(axis="both", nbins=5)
    axes.tick_params(labelsize=7.5, colors="#555555", length=2)
    axes.grid(color="#e3e3e3", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlim(0.0, max((at for line in found for at, _ in line.points), default=1.0))
    axes.spines[:].set_visible(False)
    if found:
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(-0.16, -0.13),
            ncols=LEGEND_COLUMNS,
            frameon=False,
            fontsize=7.5,
            handlelength=1.0,
            columnspacing=0.9,
            labelspacing=0.25,
        )


def _leave_room(figure: Figure | SubFigure, panel: Panel, count: int) -> None:
    """Inches for title, units and legend, whatever the size of the panel."""
    height, width = panel.height * INCH_PER_ROW, panel.width * INCH_PER_COLUMN
    legend = 0.0 if panel.form is Form.STAT else 0.36 + 0.15 * math.ceil(count / LEGEND_COLUMNS)
    figure.subplots_adjust(left=0.75 / width, right=1 - 0.2 / width, top=1 - 0.33 / height, bottom=legend / height)
    if panel.form is Form.STAT:
        figure.subplots_adjust(left=0.12 / width)


def _columns(line: Line) -> tuple[list[float], list[float]]:
    return [at for at, _ in line.points], [value for _, value in line.points]


def _name(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)


def written(value: float, unit: Unit) -> str:
    """A value as a person reads it: ``1.2k tokens/s``, ``35%``, ``120 ms``."""
    if not math.isfinite(value):
        return "no data"
    if unit is Unit.SHARE:
        return f"{value:.0%}"
    if unit is Unit.SECONDS:
        return f"{value * 1000:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    return f"{_short(value)}{'' if unit is Unit.NUMBER else ' ' + unit.value}"


def _short(value: float) -> str:
    size, suffix = next(((size, suffix) for size, suffix in SUFFIXES if abs(value) >= size), (1.0, ""))
    return f"{value / size:.3g}{suffix}"
