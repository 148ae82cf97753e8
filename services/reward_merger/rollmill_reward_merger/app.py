"""The reward-merger as a service."""

from __future__ import annotations

from rollmill.runtime.app import Service
from rollmill.runtime.claim_check import largest_value
from rollmill.topics import TRAJECTORIES
from rollmill_reward_merger.settings import RewardMergerSettings
from rollmill_reward_merger.stage import RewardMergerStage


def build(settings: RewardMergerSettings) -> Service:
    largest = largest_value(TRAJECTORIES, settings)
    stage = RewardMergerStage(partitions=settings.partitions, windows=settings.windows, largest=largest)
    return Service(name=stage.name, settings=settings, stages=(stage,))
