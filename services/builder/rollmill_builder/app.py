"""Wires the builder."""

from __future__ import annotations

from rollmill.app import Service
from rollmill.strategies import builder_registry
from rollmill_builder.handlers import BuilderStage
from rollmill_builder.settings import BuilderSettings


def build(settings: BuilderSettings) -> Service:
    stage = BuilderStage(
        registry=builder_registry(),
        partitions=settings.partitions,
        late_window=settings.late_window_seconds,
        expiry_seconds=settings.expiry_seconds,
    )
    return Service("builder", settings, stages=(stage,))
