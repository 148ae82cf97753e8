"""Wires the builder."""

from __future__ import annotations

from rollmill.app import Service
from rollmill.claims import largest_value
from rollmill.strategies import builder_registry
from rollmill.topics import BUILT
from rollmill_builder.handlers import BuilderStage
from rollmill_builder.settings import BuilderSettings
from rollmill_builder.shards import MemoryLimits


def build(settings: BuilderSettings) -> Service:
    stage = BuilderStage(
        registry=builder_registry(),
        partitions=settings.partitions,
        late_window=settings.late_window_seconds,
        expiry_seconds=settings.expiry_seconds,
        memory=MemoryLimits(settings.memory_budget_bytes, settings.spill_bytes, settings.spill_directory),
        largest=largest_value(BUILT, settings),
    )
    return Service("builder", settings, stages=(stage,))
