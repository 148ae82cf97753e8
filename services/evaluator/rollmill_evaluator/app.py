"""The evaluator as a service."""

from __future__ import annotations

from rollmill.runtime.app import Service
from rollmill_evaluator.delivery.webhook import run_webhook
from rollmill_evaluator.settings import EvaluatorSettings
from rollmill_evaluator.worker import NAME, work


def build(settings: EvaluatorSettings) -> Service:
    workers = (work,) if settings.webhook_url is None else (work, run_webhook)
    return Service(name=NAME, settings=settings, workers=workers)
