"""How evaluations become rewards.

Whose word counts. An evaluation fills the slot of its evaluator, or the slot of the evaluation that it supersedes;
the last word in a slot stands. Where the session's spec names evaluators, exactly their slots count, each with the
weight of its `EvaluatorSpec` (weight 0: awaited and kept, never counted). Where the spec names none, every slot
counts with weight 1. What does not count is kept as provenance all the same.

What it gives, rule ``single`` for one counting slot and ``weighted_mean`` for several: the rollout's outcome is the
weighted mean of the outcome rewards, None where one of them is missing. A trace's reward is the weighted mean of what
each evaluator says of it: its trace reward where the evaluator gives trace rewards (a None there leaves the trace
ungraded), else its outcome reward. Zero is a value; None is not.

What it refuses. A number of trace rewards other than the number of traces makes the session an ERROR. A counting
slot that is empty, not graded, or without any reward leaves the whole rollout ungraded, with that slot's reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.models import Evaluation, SessionSpec, Trajectory, TrajectoryStatus

Rewards = tuple[float | None, ...]

DEADLINE = "deadline"
NO_EVALUATOR = "no_evaluator"
NO_REWARD = "no_reward"
COUNT_MISMATCH = "trace_count_mismatch"


@dataclass(frozen=True)
class Counting:
    """One slot that counts: its share of the mean (all shares sum to 1) and the word that stands in it."""

    share: float
    evaluation: Evaluation | None


@dataclass(frozen=True)
class Verdict:
    """What the counting evaluations give together."""

    traces: Rewards
    outcome: float | None = None
    ungraded_reason: str | None = None
    error: str | None = None


def merge(trajectory: Trajectory, evaluations: Sequence[Evaluation]) -> Trajectory:
    """``trajectory`` with rewards, provenance and, where no reward came, the reason.

    ``evaluations``: everything said of the session so far, in the order of the evaluations partition.
    """
    standing = last_words(evaluations)
    counting = counting_slots(trajectory.spec, standing)
    verdict = judge(len(trajectory.traces), counting)
    rewarded = tuple(
        trace.replace(reward=reward) for trace, reward in zip(trajectory.traces, verdict.traces, strict=True)
    )
    return trajectory.replace(
        traces=rewarded,
        evaluation=provenance(evaluations, standing, counting, verdict) if evaluations else None,
        ungraded_reason=verdict.ungraded_reason,
        **_failure(trajectory, verdict),
    )


def is_timer(evaluation: Evaluation) -> bool:
    """True for a record of the merger's own timers: it says nothing of the session."""
    return evaluation.final and evaluation.not_graded is not None


def slots(evaluations: Iterable[Evaluation]) -> dict[str, str]:
    """The slot of each evaluation id: its evaluator, or the slot of what it supersedes."""
    found: dict[str, str] = {}
    for evaluation in evaluations:
        found[evaluation.evaluation_id] = found.get(evaluation.supersedes or "", evaluation.evaluator)
    return found


def last_words(evaluations: Sequence[Evaluation]) -> dict[str, Evaluation]:
    """The evaluation that stands in each slot."""
    slot_of = slots(evaluations)
    return {slot_of[item.evaluation_id]: item for item in evaluations if not is_timer(item)}


def counting_slots(spec: SessionSpec, standing: Mapping[str, Evaluation]) -> list[Counting]:
    """The slots that count, in the order of the spec, else by name; weights normalised to shares."""
    if spec.evaluators:
        weights = {evaluator.label: evaluator.weight for evaluator in spec.evaluators if evaluator.weight > 0}
    else:
        weights = dict.fromkeys(sorted(standing), 1.0)
    largest = max(weights.values(), default=1.0)
    total = math.fsum(weight / largest for weight in weights.values())
    return [Counting(weight / largest / total, standing.get(slot)) for slot, weight in weights.items()]


def judge(traces: int, counting: Sequence[Counting]) -> Verdict:
    """The rewards that the counting slots give ``traces`` traces."""
    nothing: Rewards = (None,) * traces
    if not counting:
        return Verdict(nothing, ungraded_reason=NO_EVALUATOR)
    for item in counting:
        if (error := _mismatch(traces, item.evaluation)) is not None:
            return Verdict(nothing, ungraded_reason=COUNT_MISMATCH, error=error)
    for item in counting:
        if (reason := _why_ungraded(item.evaluation)) is not None:
            return Verdict(nothing, ungraded_reason=reason)
    graded = [(item.share, item.evaluation) for item in counting if item.evaluation is not None]
    return _mean(traces, graded)


def _mean(traces: int, graded: Sequence[tuple[float, Evaluation]]) -> Verdict:
    words = [(share, _per_trace(traces, evaluation)) for share, evaluation in graded]
    rewards = tuple(weighted([(share, word[index]) for share, word in words]) for index in range(traces))
    outcome = weighted([(share, evaluation.outcome_reward) for share, evaluation in graded])
    silent = outcome is None and all(reward is None for reward in rewards) and traces > 0
    return Verdict(rewards, outcome, ungraded_reason=NO_REWARD if silent else None)


def weighted(parts: Sequence[tuple[float, float | None]]) -> float | None:
    """Sum of share times value, shares summing to 1; None where any value is None.

    The parts are summed exactly, so their order does not matter, and a single part comes out as it went in.
    """
    if any(value is None for _, value in parts):
        return None
    return math.fsum(share * value for share, value in parts if value is not None)


def _per_trace(traces: int, evaluation: Evaluation) -> Rewards:
    """Trace rewards win over the outcome; one outcome is broadcast."""
    if evaluation.trace_rewards is not None:
        return evaluation.trace_rewards
    return (evaluation.outcome_reward,) * traces


def _mismatch(traces: int, evaluation: Evaluation | None) -> str | None:
    if evaluation is None or evaluation.trace_rewards is None or len(evaluation.trace_rewards) == traces:
        return None
    given = len(evaluation.trace_rewards)
    return f"evaluator {evaluation.evaluator} returned {given} trace_rewards but the trajectory has {traces} traces"


def _why_ungraded(evaluation: Evaluation | None) -> str | None:
    if evaluation is None:
        return DEADLINE
    if evaluation.not_graded is not None:
        return evaluation.not_graded
    silent = evaluation.outcome_reward is None and evaluation.trace_rewards is None
    return NO_REWARD if silent else None


def _failure(trajectory: Trajectory, verdict: Verdict) -> dict[str, Any]:
    if verdict.error is None:
        return {}
    errors = [text for text in (trajectory.error, verdict.error) if text]
    return {"status": TrajectoryStatus.ERROR, "error": "; ".join(errors)}


def provenance(
    evaluations: Sequence[Evaluation],
    standing: Mapping[str, Evaluation],
    counting: Sequence[Counting],
    verdict: Verdict,
) -> dict[str, Any]:
    """Where the reward came from. An evaluator's own metadata stays inside its entry: it overwrites nothing."""
    counted = {item.evaluation.evaluation_id: item.share for item in counting if item.evaluation is not None}
    stands = {evaluation.evaluation_id for evaluation in standing.values()}
    per_trace = verdict.error is None and any(
        item.evaluation is not None and item.evaluation.trace_rewards is not None for item in counting
    )
    return {
        "outcome_reward": verdict.outcome,
        "trace_rewards": list(verdict.traces) if per_trace else None,
        "rule": "single" if len(counting) == 1 else "weighted_mean",
        "evaluations": [
            {
                **_entry(evaluation),
                "share": counted.get(evaluation.evaluation_id),
                "stands": evaluation.evaluation_id in stands,
            }
            for evaluation in evaluations
        ],
    }


ENTRY = (
    "evaluation_id",
    "evaluator",
    "version",
    "duration_seconds",
    "at",
    "supersedes",
    "outcome_reward",
    "trace_rewards",
    "not_graded",
    "components",
    "metadata",
)


def _entry(evaluation: Evaluation) -> dict[str, Any]:
    values = {name: getattr(evaluation, name) for name in ENTRY}
    rewards = evaluation.trace_rewards
    return {**values, "trace_rewards": None if rewards is None else list(rewards)}
