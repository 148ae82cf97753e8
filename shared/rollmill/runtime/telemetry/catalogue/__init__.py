"""Every metric that any program of Rollmill exports. What is not here cannot be exported.

`metric` is the type of an entry; `stages` has those of the engine and its stages, `services` the others.

All series have two more labels: ``component``, who exports it, and ``prefix``, the topics' prefix of its run.
"""

from __future__ import annotations

from dataclasses import replace

from rollmill.runtime.telemetry.catalogue.metric import NAMESPACE, Kind, Label, Metric
from rollmill.runtime.telemetry.catalogue.services import CAPTURE, EVALUATOR, LEDGER, SERVICE_METRICS
from rollmill.runtime.telemetry.catalogue.stages import BATCHER, BUILDER, ENGINE_METRICS, EVENTS, MERGER, STAGE_METRICS

COMPONENTS = (CAPTURE, BUILDER, EVALUATOR, MERGER, BATCHER, LEDGER)
COMPONENT, PREFIX = "component", "prefix"
WRITTEN = Metric(
    "written_records",
    Kind.COUNTER,
    "Records written; of a topic that others write to, too, only those of this component.",
    (CAPTURE, BUILDER, EVALUATOR, MERGER, BATCHER),
    (Label("topic"),),
    "records",
)
UNDECLARED = Metric(
    "undeclared_metrics",
    Kind.COUNTER,
    "Measurements dropped because the catalogue does not know their name or labels: a fault of the program.",
    COMPONENTS,
    unit="measurements",
)
CATALOGUE: tuple[Metric, ...] = (UNDECLARED, WRITTEN, *SERVICE_METRICS, *STAGE_METRICS)

__all__ = [
    "CATALOGUE",
    "COMPONENT",
    "COMPONENTS",
    "NAMESPACE",
    "PREFIX",
    "Kind",
    "Label",
    "Metric",
    "metrics_of",
]


def metrics_of(component: str) -> dict[str, Metric]:
    """What ``component`` exports, by name. A stage of yours has the engine's metrics, and any event."""
    if component in COMPONENTS:
        return {metric.name: metric for metric in CATALOGUE if component in metric.components}
    events = next(metric for metric in CATALOGUE if metric.name == EVENTS)
    own = replace(events, components=(component,), labels=(Label("event", free=True),))
    return {metric.name: metric for metric in (UNDECLARED, WRITTEN, *ENGINE_METRICS, own)}
