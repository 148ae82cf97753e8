"""Boards as Grafana's JSON, by its own SDK."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

from dashboards.panels import GREEN, MEANINGS, Board, Form, Panel, Target

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
PREFIXES = "label_values(rollmill_undeclared_metrics_total, prefix)"
"""A metric that every component exports from its start."""


def dashboard_json(board: Board) -> str:
    """The file that Grafana provisions; the same text for the same board."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["rollmill"])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("prefix")
            .label("Prefix")
            .description("Begins the topics of a run")
            .datasource(SOURCE)
            .query(PREFIXES)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    )
    ids = count(1)
    for row in board.rows:
        made.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            made.with_panel((_stat(panel) if panel.form is Form.STAT else _lines(panel)).id(next(ids)))
    plain = json.loads(JSONEncoder().encode(made.build()))
    return json.dumps(_without_nulls(plain), indent=2, sort_keys=True) + "\n"


def _stat(panel: Panel) -> stat.Panel:
    newest = common.ReduceDataOptions().calcs(["lastNotNull"])
    made = (
        stat.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(SOURCE)
        .unit(panel.unit.value)
        .span(panel.width)
        .height(panel.height)
        .thresholds(_thresholds(panel))
        .reduce_options(newest)
        .graph_mode(kinds.BigValueGraphMode.AREA)
    )
    for query in _queries(panel.targets):
        made.with_target(query)
    return made


def _lines(panel: Panel) -> timeseries.Panel:
    stacked = panel.form is Form.STACKED
    stacking = kinds.StackingMode.NORMAL if stacked else kinds.StackingMode.NONE
    legend = common.VizLegendOptions().show_legend(True).placement(kinds.LegendPlacement.BOTTOM)  # noqa: FBT003  # the SDK's
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(SOURCE)
        .unit(panel.unit.value)
        .span(panel.width)
        .height(panel.height)
        .thresholds(_thresholds(panel))
        .stacking(common.StackingConfig().mode(stacking))
        .fill_opacity(30 if stacked else 5)
        .legend(legend.display_mode(kinds.LegendDisplayMode.LIST))
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI))
    )
    if not panel.signed:
        made.min(0.0)
    if _named_by_meaning(panel):
        for name, color in MEANINGS.items():
            made.override_by_name(name, [DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})])
    for query in _queries(panel.targets):
        made.with_target(query)
    return made


def _named_by_meaning(panel: Panel) -> bool:
    return any(target.legend in {"{{fate}}", "{{status}}", "{{state}}"} for target in panel.targets)


def _queries(targets: Sequence[Target]) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().ref_id(chr(ord("A") + place)).expr(target.expr).legend_format(target.legend).range()
        for place, target in enumerate(targets)
    ]


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    steps = [Threshold(value=None, color=GREEN), *(Threshold(value=at, color=color) for at, color in panel.thresholds)]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _without_nulls(value: Any) -> Any:
    """Grafana takes what is not there for its default; the base threshold's null is a value."""
    if isinstance(value, dict):
        kept = {name: _without_nulls(item) for name, item in value.items() if item is not None or name == "value"}
        return {name: item for name, item in kept.items() if name != "value" or item is not None or "color" in value}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
