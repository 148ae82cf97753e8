"""What the services have counted since they started, from their metrics, as lines for a person."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

WATCH_SECONDS = 5.0
ANSWER_SECONDS = 2.0

EVENTS = {
    ("builder", "sessions_closed"): "sessions ended",
    ("reward-merger", "graded"): "trajectories graded",
    ("reward-merger", "ungraded"): "not graded",
    ("batcher", "steps"): "steps",
}
"""What is shown of ``rollmill_stage_events_total``, by component and event."""


@dataclass
class Counted:
    """Numbers of one look at all services."""

    events: Counter[str] = field(default_factory=Counter)
    dead_letters: int = 0
    engine_ids: dict[str, bool] = field(default_factory=dict)
    """By upstream, whether the engine reports token ids; empty until it has been asked."""

    def take(self, service: str, text: str) -> None:
        """Add the metrics of a service, in Prometheus' text format."""
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "rollmill_stage_events_total":
                    self._event(service, sample.labels.get("event", ""), sample.value)
                elif sample.name == "rollmill_dead_letters_total":
                    self.dead_letters += int(sample.value)
                elif sample.name == "rollmill_engine_ids":
                    self.engine_ids[sample.labels.get("upstream", "")] = bool(sample.value)

    def _event(self, service: str, event: str, value: float) -> None:
        if (service, event) in EVENTS:
            self.events[EVENTS[service, event]] += int(value)

    def lines(self) -> Iterable[str]:
        """The numbers, then what each engine reports."""
        numbers = ", ".join(f"{name} {self.events[name]}" for name in EVENTS.values())
        yield f"since the start: {numbers}, dead letters {self.dead_letters}"
        for upstream, reports in self.engine_ids.items():
            what = "token ids" if reports else "NO token ids: nothing that it samples can be trained (docs/capture.md)"
            yield f"engine {upstream}: reports {what}"


async def watch(urls: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Report each line that is new, until cancelled. ``urls``: of the services' health servers."""
    reported: set[str] = set()
    while True:
        counted = Counted()
        for service, url in urls.items():
            with suppress(URLError, OSError, ValueError):  # it is being restarted
                counted.take(service, await asyncio.to_thread(_metrics, url))
        lines = list(counted.lines())
        for line in lines:
            if line not in reported:
                report(line)
        reported = set(lines)
        await asyncio.sleep(WATCH_SECONDS)


def _metrics(url: str) -> str:
    with urlopen(f"{url}/metrics", timeout=ANSWER_SECONDS) as answer:  # noqa: S310  # loopback, of our own services
        text: str = answer.read().decode()
        return text
