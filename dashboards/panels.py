"""What a panel is, whoever draws it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

GREEN, ORANGE, RED, BLUE, GRAY = "green", "orange", "red", "blue", "gray"
MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "ok": GREEN,
        "trained": GREEN,
        "cut": GREEN,
        "pending": BLUE,
        "excluded": ORANGE,
        "incomplete": ORANGE,
        "expired": ORANGE,
        "error": RED,
        "failed": RED,
        "dead_lettered": RED,
        "client_gone": GRAY,
    }
)
"""Colours of series whose name says whether they are good, wherever they are drawn; others take what comes."""


class Form(StrEnum):
    STAT = "stat"
    """One number, the newest."""
    LINES = "lines"
    STACKED = "stacked"
    """Areas that add up."""


class Unit(StrEnum):
    """Units as Grafana names them; what it does not know it writes behind the number."""

    NUMBER = "short"
    SHARE = "percentunit"
    """1 is all of it."""
    SECONDS = "s"
    RECORDS_PER_SECOND = "records/s"
    TOKENS_PER_SECOND = "tokens/s"
    CALLS_PER_SECOND = "calls/s"
    GROUPS_PER_SECOND = "groups/s"
    RECORDS = "records"
    TOKENS = "tokens"
    VERSIONS = "versions"


@dataclass(frozen=True)
class Target:
    """An expression in PromQL, and how its series are called: ``{{label}}`` stands for a label's value."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    title: str
    description: str
    unit: Unit
    targets: tuple[Target, ...]
    form: Form = Form.LINES
    thresholds: tuple[tuple[float, str], ...] = ()
    """From which value on which colour; below the first it is green."""
    width: int = 8
    """Of 24 columns."""
    height: int = 8
    signed: bool = False
    """Whether values below 0 are to be expected; else the axis begins at 0."""

    @property
    def slug(self) -> str:
        return "-".join(self.title.lower().replace(",", "").split())


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """``uid`` and file name of a dashboard never change: links go by them."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    def panels(self) -> Iterator[Panel]:
        return (panel for row in self.rows for panel in row.panels)

    def expressions(self) -> Iterator[tuple[Panel, str]]:
        return ((panel, target.expr) for panel in self.panels() for target in panel.targets)


def substituted(expr: str, variables: Mapping[str, str]) -> str:
    """``expr`` with Grafana's variables replaced, ``$name`` each, the longest names first."""
    for name in sorted(variables, key=len, reverse=True):
        expr = expr.replace(f"${name}", variables[name])
    return expr
