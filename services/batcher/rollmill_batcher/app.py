"""The batcher as a service: one stage, or none where the run's batches are not made here."""

from __future__ import annotations

from rollmill.runtime.app import Service
from rollmill_batcher.consumer_mode import idle, no_other_consumer
from rollmill_batcher.settings import BatcherSettings
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.steps.cut import STAGE


def build(settings: BatcherSettings) -> Service:
    """The service. Raises ConfigurationError where the settings name no usable strategy."""
    config = settings.batcher_config()
    if settings.hand_over != "batches":
        return Service(name=STAGE, settings=settings, workers=(idle,))
    return Service(name=STAGE, settings=settings, stages=(BatcherStage(config),), checks=(no_other_consumer,))
