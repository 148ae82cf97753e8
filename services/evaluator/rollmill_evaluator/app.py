"""The evaluator as a service."""

from __future__ import annotations

from rollmill.app import Service
from rollmill_evaluator.settings import EvaluatorSettings
from rollmill_evaluator.worker import NAME, work


def build(settings: EvaluatorSettings) -> Service:
    return Service(name=NAME, settings=settings, workers=(work,))
