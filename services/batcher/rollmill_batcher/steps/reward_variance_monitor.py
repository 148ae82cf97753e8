"""Warns where the rewards of a run never differ: such a run learns nothing, and no other check fails."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from rollmill_batcher.groups.group_evaluation import EvaluatedGroup

MOST_IN_A_ROW = 50
"""Groups of equal rewards after which it warns. A task that is too hard or solved gives many, but not all in a row."""

log = structlog.get_logger(__name__)


class RewardVarianceMonitor:
    """Counts groups in a row with one reward for all rollouts, since this task started. Decides nothing."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def observe(self, closed: Iterable[EvaluatedGroup]) -> None:
        """Warns once for each such row. Groups with fewer than two rewards do not count."""
        for group in closed:
            if len(group.rewards) > 1:
                self._in_a_row = self._in_a_row + 1 if group.has_equal_rewards else 0
                if self._in_a_row == MOST_IN_A_ROW:
                    _warn(group)


def _warn(last: EvaluatedGroup) -> None:
    log.warning(
        "rewards of many groups in a row do not differ, so comparing them teaches nothing: the task is too hard or "
        "solved, or its evaluator does not see the agents' output; look at the evaluations of this group",
        groups_in_a_row=MOST_IN_A_ROW,
        group=last.group.group_id,
        reward=last.rewards[0],
    )
