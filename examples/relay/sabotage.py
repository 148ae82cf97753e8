"""Test switches that spoil one thing each, so that a test can show that the demo's own checks notice it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from relay.task import END_OF_TURN_ID

if TYPE_CHECKING:  # it imports torch, which the services that import this module do without
    from relay.sampler import Reply

_T = TypeVar("_T")


class Sabotage(StrEnum):
    NONE = "none"
    SHIFT_LOGPROBS = "shift_logprobs"
    SHIFT_MASK = "shift_mask"
    SHIFT_LABELS = "shift_labels"
    DROP_END_OF_TURN = "drop_end_of_turn"
    SWAP_GROUPS = "swap_groups"
    SWAP_REWARDS = "swap_rewards"


def shifted(values: Sequence[_T]) -> tuple[_T, ...]:
    """The values one position later, the last one in front."""
    return (*values[-1:], *values[:-1])


def spoiled_reply(reply: Reply, sabotage: Sabotage) -> Reply:
    """What the engine reports of a reply."""
    if sabotage is Sabotage.SHIFT_LOGPROBS:
        return replace(reply, log_probs=shifted(reply.log_probs))
    if sabotage is Sabotage.DROP_END_OF_TURN and reply.token_ids[-1:] == (END_OF_TURN_ID,):
        return replace(reply, token_ids=reply.token_ids[:-1], log_probs=reply.log_probs[:-1])
    return reply


def spoiled_version(version: int, sabotage: Sabotage) -> int:
    """What the engine reports as the version that sampled: one too low, so that the label names weights that exist."""
    return max(version - 1, 0) if sabotage is Sabotage.SHIFT_LABELS else version


def spoiled_group(group: int, member: int, sabotage: Sabotage) -> int:
    """The group that an agent says it belongs to.

    Every other member changes places with the same member of the neighbouring group, so that sizes stay right.
    """
    return group ^ 1 if sabotage is Sabotage.SWAP_GROUPS and member % 2 == 0 else group


def spoiled_reward(value: float, sabotage: Sabotage) -> float:
    """What the evaluator reports of a session."""
    return 1.0 - value if sabotage is Sabotage.SWAP_REWARDS else value
