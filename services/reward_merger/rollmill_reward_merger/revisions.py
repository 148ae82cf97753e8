"""Which evaluations make which revision (rules M1, M2). Pure functions of a session's records.

The evaluations of a session count in the order of their partition, each id once. The first complete set is the
shortest prefix in which every evaluator of the spec has answered (also by an evaluation that supersedes an answer of
it), or which ends with a final record; without evaluators in the spec it is the empty prefix. Revision 0 merges that
set, and every evaluation after it makes one more revision, whoever sent it. A timer's record after it makes none.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.models import Evaluation, SessionSpec, Trajectory
from rollmill_reward_merger.merging import is_timer, merge, slots_by_id


def first_complete_length(spec: SessionSpec, evaluations: Sequence[Evaluation]) -> int | None:
    """Length of the first complete set; None while it is not complete."""
    missing = {evaluator.label for evaluator in spec.evaluators}
    slots = slots_by_id(evaluations)
    if not missing:
        return 0
    for count, evaluation in enumerate(evaluations, start=1):
        missing.discard(slots[evaluation.evaluation_id])
        if evaluation.final or not missing:
            return count
    return None


def revision_inputs(spec: SessionSpec, evaluations: Sequence[Evaluation]) -> list[Sequence[Evaluation]]:
    """What each revision so far merges, in order; empty while the first set is not complete."""
    first = first_complete_length(spec, evaluations)
    if first is None:
        return []
    merged = [each for position, each in enumerate(evaluations) if position < first or not is_timer(each)]
    return [merged[:length] for length in range(first, len(merged) + 1)]


def revisions(trajectory: Trajectory, evaluations: Sequence[Evaluation], *, after: int = 0) -> list[Trajectory]:
    """The revisions from number ``after`` on, in order."""
    numbered = list(enumerate(revision_inputs(trajectory.spec, evaluations)))
    return [merge(trajectory, merged).replace(revision=number) for number, merged in numbered[after:]]


def first_merge_at(trajectory: Trajectory, evaluations: Sequence[Evaluation]) -> float | None:
    """Event time of the first merge, 0.0 where no record has one; None while the first set is not complete."""
    first = first_complete_length(trajectory.spec, evaluations)
    if first is None:
        return None
    return max(trajectory.closed_at, evaluations[first - 1].at if first else 0.0)
