"""A live run and its replay side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollmill.ops.replay.summary import Summary


@dataclass(frozen=True)
class Comparison:
    """``left_out``: sessions that began before what was asked for."""

    live: Summary
    replay: Summary
    sessions: int
    left_out: int

    def as_json(self) -> dict[str, Any]:
        counts = {"sessions": self.sessions, "left_out": self.left_out}
        return {**counts, "live": self.live.as_json(), "replay": self.replay.as_json()}

    def table(self) -> str:
        """One line per number: live and replayed."""
        live, replay = (dict(flat(summary.as_json())) for summary in (self.live, self.replay))
        names = list(dict.fromkeys([*live, *replay]))
        rows = [("", "live", "replay"), *((name, _cell(live.get(name)), _cell(replay.get(name))) for name in names)]
        width = max(len(name) for name, _, _ in rows)
        head = f"{self.sessions} sessions; {self.left_out} began before and were left out"
        return "\n".join(
            [head, *(f"{name:<{width}}  {live_cell:>14}  {replay_cell:>14}" for name, live_cell, replay_cell in rows)]
        )


def flat(value: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested names written with spaces between them."""
    for name, item in value.items():
        label = f"{before} {name}".strip().replace("_", " ")
        if isinstance(item, dict):
            yield from flat(item, label)
        else:
            yield label, item


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
