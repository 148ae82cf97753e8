"""Wires the builder."""

from __future__ import annotations

from rollmill.runtime.app import Service
from rollmill.runtime.claim_check import largest_value
from rollmill.strategies import builder_registry
from rollmill.topics import BUILT
from rollmill_builder.sessions.task_resources import MemoryLimits
from rollmill_builder.settings import BuilderSettings
from rollmill_builder.stage import BuilderStage


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
