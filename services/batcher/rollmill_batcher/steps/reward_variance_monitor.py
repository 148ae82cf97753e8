"""Whether rewards tell rollouts apart at all: a run whose rewards are all equal learns nothing and fails nowhere."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from rollmill_batcher.groups.group_evaluation import EvaluatedGroup

MOST_IN_A_ROW = 50
"""Groups without a difference, after which it is said. A task that is hard or solved has many, and others between."""

log = structlog.get_logger(__name__)


class RewardVarianceMonitor:
    """Counts groups in a row whose rollouts all got one reward, since this task started. Decides nothing."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def saw(self, closed: Iterable[EvaluatedGroup]) -> None:
        """Warns once for each row of them. Groups with fewer than two rewards say nothing about it."""
        for group in closed:
            if len(group.rewards) > 1:
                self._in_a_row = self._in_a_row + 1 if group.compares_nothing else 0
                if self._in_a_row == MOST_IN_A_ROW:
                    _warn(group)


def _warn(last: EvaluatedGroup) -> None:
    log.warning(
        "no group's rewards differ, so nothing is learnt from comparing them: the task is too hard or solved, or its "
        "evaluator does not see what agents hand in",
        groups_in_a_row=MOST_IN_A_ROW,
        group=last.group.group_id,
        reward=last.rewards[0],
    )
