"""The reward-merger as a service."""

from __future__ import annotations

from rollmill.app import Service
from rollmill.claims import largest_value
from rollmill.topics import TRAJECTORIES
from rollmill_reward_merger.handlers import RewardMergerStage
from rollmill_reward_merger.settings import RewardMergerSettings


def build(settings: RewardMergerSettings) -> Service:
    largest = largest_value(TRAJECTORIES, settings)
    stage = RewardMergerStage(partitions=settings.partitions, windows=settings.windows, largest=largest)
    return Service(name=stage.name, settings=settings, stages=(stage,))
