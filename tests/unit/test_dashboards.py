"""The dashboards as files: what is committed is what the code makes, and asks for nothing that is not exported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from promql_parser import VectorSelector, walk

from dashboards.files import expected, write
from dashboards.overview import BOARDS
from dashboards.panels import Form, Panel, Unit, substituted
from dashboards.preview import Line, draw_board, draw_panel, written
from rollmill.runtime.telemetry.catalogue import CATALOGUE, COMPONENT, PREFIX, Kind, Metric

ROOT = Path(__file__).parents[2]
VARIABLES = {"prefix": "demo.", "__rate_interval": "1m"}
PANELS = [panel for board in BOARDS.values() for panel in board.panels()]


def named(panel: Panel) -> str:
    return panel.slug


@pytest.mark.parametrize("path", expected(), ids=str)
def test_what_is_committed_is_what_the_code_makes(path: Path) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == expected()[path], "run `make dashboards`"


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    assert write(tmp_path) == list(expected())
    assert write(tmp_path) == []


def selectors(expr: str) -> list[VectorSelector]:
    found: list[VectorSelector] = []

    def take(node: Any) -> bool:
        if isinstance(node, VectorSelector):
            found.append(node)
        return True

    walk(promql_parser.parse(substituted(expr, VARIABLES)), take)
    return found


def series() -> dict[str, list[Metric]]:
    """Entries of the catalogue by the names of their series."""
    found: dict[str, list[Metric]] = {}
    for metric in CATALOGUE:
        ends = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        for end in ends:
            found.setdefault(metric.full_name + end, []).append(metric)
    return found


@pytest.mark.parametrize("panel", PANELS, ids=named)
def test_every_metric_and_label_of_a_panel_is_in_the_catalogue(panel: Panel) -> None:
    known = series()
    for target in panel.targets:
        for selector in selectors(target.expr):
            entries = known[str(selector.name)]
            labels = {COMPONENT, PREFIX, *entries[0].label_names}
            asked = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            assert asked.keys() <= labels
            assert asked[PREFIX] == "demo.", "every run sees its own series alone"
            component = asked.get(COMPONENT)
            fitting = [entry for entry in entries if component is None or component in entry.components]
            declared = {label.name: label for entry in fitting for label in entry.labels}
            assert all(declared[name].takes(value) for name, value in asked.items() if name in declared)


@pytest.mark.parametrize("panel", PANELS, ids=named)
def test_a_legend_names_labels_that_its_expression_keeps(panel: Panel) -> None:
    for target in panel.targets:
        kept = {name for names in re.findall(r"by \(([^)]*)\)", target.expr) for name in names.split(", ")}
        assert set(re.findall(r"{{(\w+)}}", target.legend)) <= kept
    legends = [target.legend for target in panel.targets]
    assert len(set(legends)) == len(legends)


@pytest.mark.parametrize("panel", PANELS, ids=named)
def test_a_counter_is_asked_for_its_rate_where_it_is_drawn_per_second(panel: Panel) -> None:
    per_second = panel.unit.value.endswith("/s")
    assert all(("rate(" in target.expr) for target in panel.targets if per_second)
    assert panel.description.endswith(".")


def drawn_panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in board["panels"] if panel["type"] != "row")


@pytest.mark.parametrize("name", BOARDS)
def test_grafana_gets_whole_panels(name: str) -> None:
    board = json.loads((ROOT / f"charts/rollmill/dashboards/{name}.json").read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in board["panels"]]
    assert sorted(set(ids)) == sorted(ids)
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "prefix"]
    assert board["uid"] == BOARDS[name].uid
    for panel in drawn_panels(board):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0] == {"color": "green", "value": None}
        assert panel["description"]


def test_panels_do_not_lie_on_each_other() -> None:
    board = json.loads((ROOT / "charts/rollmill/dashboards/overview.json").read_text(encoding="utf-8"))
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1234.0, Unit.TOKENS_PER_SECOND, "1.23k tokens/s"),
        (0.35, Unit.SHARE, "35%"),
        (0.012, Unit.SECONDS, "12 ms"),
        (90.0, Unit.SECONDS, "90 s"),
        (0.0, Unit.NUMBER, "0"),
        (float("nan"), Unit.TOKENS, "no data"),
    ],
)
def test_values_are_written_for_people(value: float, unit: Unit, text: str) -> None:
    assert written(value, unit) == text


def test_every_panel_can_be_drawn_with_data_and_without(tmp_path: Path) -> None:
    board = BOARDS["overview"]
    late = tuple((float(at), float("nan") if at < 3 else at * 7.0) for at in range(1, 20))
    data = {
        panel.title: [Line("one", ((0.0, 1.0), (10.0, 2.0))), Line("two", late)] if number % 3 else []
        for number, panel in enumerate(board.panels())
    }
    draw_board(board, data, tmp_path / "board.png")
    stacked = next(panel for panel in board.panels() if panel.form is Form.STACKED)
    draw_panel(stacked, data[stacked.title], tmp_path / "panel.png")
    assert (tmp_path / "board.png").read_bytes()[:4] == (tmp_path / "panel.png").read_bytes()[:4] == b"\x89PNG"
