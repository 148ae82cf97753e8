"""Words to whoever drives rollouts: a group was closed without a step, and why (topic ``refills``)."""

from __future__ import annotations

from collections.abc import Iterable

from rollmill.models import Cut, RefillRequest
from rollmill_batcher.groups.group import GroupState
from rollmill_batcher.groups.group_evaluation import EvaluatedGroup

NOTHING_TO_TRAIN = "nothing_to_train"


def refill_requests(closed: Iterable[EvaluatedGroup], cut: Cut, least: int) -> list[RefillRequest]:
    """One for each group that expired or failed at ``cut``.

    None for a group that announced fewer rollouts than the ``least`` that are compared: it would fail again, for ever.
    """
    lacking = [group for group in closed if group.state is not GroupState.CUT and group.group.size >= least]
    return [_request(group, cut) for group in lacking]


def _request(group: EvaluatedGroup, cut: Cut) -> RefillRequest:
    spec = group.group.members[0].spec
    return RefillRequest(
        run=cut.run,
        policy=cut.policy,
        group_id=group.group.group_id,
        task_id=spec.task_id,
        dataset=spec.dataset,
        count=group.group.size,
        reason=group.reason or _common_reason(group),
        failures=group.failures,
        sequence=cut.sequence,
        at=cut.now,
    )


def _common_reason(group: EvaluatedGroup) -> str:
    """That of all traces, such as ``stale``, where they have one in common."""
    reasons = {trace.reason for member in group.members for trace in member.traces}
    (reason,) = reasons if len(reasons) == 1 else (None,)
    return reason or NOTHING_TO_TRAIN
