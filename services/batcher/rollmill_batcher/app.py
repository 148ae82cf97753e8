"""Wires the batcher: one stage, no workers."""

from __future__ import annotations

from rollmill.app import Service
from rollmill_batcher.cutting import STAGE
from rollmill_batcher.handlers import BatcherStage
from rollmill_batcher.settings import BatcherSettings


def build(settings: BatcherSettings) -> Service:
    """The service. Raises ConfigurationError where the settings name no usable strategy."""
    return Service(name=STAGE, settings=settings, stages=(BatcherStage(settings.rules()),))
