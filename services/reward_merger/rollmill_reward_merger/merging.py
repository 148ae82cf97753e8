"""How evaluations become rewards.

Which evaluations count. An evaluation fills the slot of its evaluator, or the slot of the evaluation that it
supersedes; the last evaluation of a slot is in effect. Where the session's spec names evaluators, exactly their slots
count (weight 0: awaited and kept, never counted). Where the spec names none, every slot counts with weight 1. What does
not count is kept as provenance nevertheless.

What the rewards are. The evaluations in effect are combined by the spec's rule (`combining`), each trace by itself
(`trace_rewards`), and the outcomes likewise; an outcome is None where one that is needed is missing. Zero is a value;
None is not.

What makes a session fail. A number of trace, turn or token rewards other than that of the traces, turns or tokens makes
the session an ERROR. A counting slot that is empty, not graded, or without any reward leaves the whole rollout
ungraded, with that slot's reason; the rules ``first`` and ``last`` pass over it while another is graded. So does a
result that float32 cannot hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollmill.models import (
    Evaluation,
    RewardRule,
    SessionSpec,
    Trace,
    Trajectory,
    TrajectoryStatus,
)
from rollmill_reward_merger.combining import OutOfRangeError, combine, extreme, weighted_sum
from rollmill_reward_merger.trace_rewards import SHAPED, TraceReward, find_mismatch, is_shaped, trace_rewards

DEADLINE = "deadline"
NO_EVALUATOR = "no_evaluator"
NO_REWARD = "no_reward"
OUT_OF_RANGE = "reward_out_of_range"
SINGLE = "single"
FALLBACKS = (RewardRule.FIRST, RewardRule.LAST)


@dataclass(frozen=True)
class CountingSlot:
    """One slot that counts, with the evaluation in effect. ``weight``: by the rule ``weighted_mean`` they sum to 1."""

    weight: float
    evaluation: Evaluation | None


@dataclass(frozen=True)
class CombinedReward:
    """What the counting slots give together."""

    traces: tuple[TraceReward, ...]
    outcome: float | None = None
    ungraded_reason: str | None = None
    error: str | None = None
    counted: tuple[CountingSlot, ...] = ()
    """Those that it was combined from."""

    @property
    def shaped(self) -> bool:
        return any(trace.tokens is not None for trace in self.traces)


def merge(trajectory: Trajectory, evaluations: Sequence[Evaluation]) -> Trajectory:
    """``trajectory`` with rewards, provenance and, where there is no reward, the reason.

    ``evaluations``: all of the session so far, in the order of the evaluations partition.
    """
    in_effect = evaluations_in_effect(evaluations)
    combined = combine_slots(trajectory, counting_slots(trajectory.spec, in_effect))
    rewarded = (rewarded_trace(*pair) for pair in zip(trajectory.traces, combined.traces, strict=True))
    return trajectory.replace(
        traces=tuple(rewarded),
        evaluation=provenance(trajectory, evaluations, in_effect, combined) if evaluations else None,
        ungraded_reason=combined.ungraded_reason,
        **_failure(trajectory, combined),
    )


def rewarded_trace(trace: Trace, given: TraceReward) -> Trace:
    """``trace`` with the rewards it was given; those of tokens become float32 [r]."""
    if given.tokens is None:
        return trace.replace(reward=given.reward)
    turns = trace.turns
    if given.turns is not None:
        turns = tuple(turn.replace(reward=reward) for turn, reward in zip(turns, given.turns, strict=True))
    return trace.replace(reward=given.reward, token_rewards=given.tokens.astype(np.float32), turns=turns)


def is_timer(evaluation: Evaluation) -> bool:
    """True for a record of the merger's own timers: it grades nothing."""
    return evaluation.final and evaluation.not_graded is not None


def slots_by_id(evaluations: Iterable[Evaluation]) -> dict[str, str]:
    """The slot of each evaluation id: its evaluator, or the slot of the evaluation that it supersedes."""
    slots: dict[str, str] = {}
    for evaluation in evaluations:
        slots[evaluation.evaluation_id] = slots.get(evaluation.supersedes or "", evaluation.evaluator)
    return slots


def evaluations_in_effect(evaluations: Sequence[Evaluation]) -> dict[str, Evaluation]:
    """The last evaluation of each slot, in the order of these last ones."""
    slots = slots_by_id(evaluations)
    in_effect: dict[str, Evaluation] = {}
    for evaluation in evaluations:
        if not is_timer(evaluation):
            in_effect.pop(slots[evaluation.evaluation_id], None)
            in_effect[slots[evaluation.evaluation_id]] = evaluation
    return in_effect


def counting_slots(spec: SessionSpec, in_effect: Mapping[str, Evaluation]) -> list[CountingSlot]:
    """The slots that count, in the order of the spec, else by name; by the rule ``last``, the latest one first."""
    if spec.evaluators:
        weights = {evaluator.label: evaluator.weight for evaluator in spec.evaluators if evaluator.weight > 0}
    else:
        weights = dict.fromkeys(sorted(in_effect), 1.0)
    if spec.reward_rule is RewardRule.WEIGHTED_MEAN:
        weights = _normalised(weights)
    if spec.reward_rule is RewardRule.LAST:
        latest_first = [slot for slot in reversed(tuple(in_effect)) if slot in weights]
        weights = {slot: weights[slot] for slot in (*latest_first, *weights)}
    return [CountingSlot(weight, in_effect.get(slot)) for slot, weight in weights.items()]


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights that sum to 1, however large or small they were."""
    largest = max(weights.values(), default=1.0)
    total = math.fsum(weight / largest for weight in weights.values())
    return {slot: weight / largest / total for slot, weight in weights.items()}


def combine_slots(trajectory: Trajectory, counting: Sequence[CountingSlot]) -> CombinedReward:
    """The rewards that the counting slots give, or why there is none."""
    traces = trajectory.traces
    no_rewards = (TraceReward(None),) * len(traces)
    if not counting:
        return CombinedReward(no_rewards, ungraded_reason=NO_EVALUATOR)
    for slot in counting:
        mismatch = None if slot.evaluation is None else find_mismatch(traces, slot.evaluation)
        if mismatch is not None:
            return CombinedReward(no_rewards, ungraded_reason=mismatch.reason, error=mismatch.detail)
    chosen = _chosen(trajectory.spec.reward_rule, counting)
    for slot in chosen:
        if (reason := _why_ungraded(slot.evaluation)) is not None:
            return CombinedReward(no_rewards, ungraded_reason=reason)
    try:
        return _combined(trajectory.spec.reward_rule, traces, chosen)
    except OutOfRangeError:
        return CombinedReward(no_rewards, ungraded_reason=OUT_OF_RANGE)


def _chosen(rule: RewardRule, counting: Sequence[CountingSlot]) -> Sequence[CountingSlot]:
    """The slots that are combined: all, or by the rules that take one the first graded, else the first of all."""
    if rule not in FALLBACKS:
        return counting
    graded = [slot for slot in counting if _why_ungraded(slot.evaluation) is None]
    return (graded or counting)[:1]


def _combined(rule: RewardRule, traces: Sequence[Trace], chosen: Sequence[CountingSlot]) -> CombinedReward:
    graded = [(slot.weight, slot.evaluation) for slot in chosen if slot.evaluation is not None]
    shaped = any(is_shaped(evaluation) for _, evaluation in graded)
    given = [(weight, trace_rewards(traces, evaluation, shaped=shaped)) for weight, evaluation in graded]
    per_trace = tuple(combine(rule, [(weight, each[index]) for weight, each in given]) for index in range(len(traces)))
    outcome = _outcome(rule, [(weight, evaluation.outcome_reward) for weight, evaluation in graded])
    is_empty = outcome is None and all(trace.reward is None for trace in per_trace) and len(traces) > 0
    return CombinedReward(per_trace, outcome, NO_REWARD if is_empty else None, counted=tuple(chosen))


def _outcome(rule: RewardRule, outcomes: Sequence[tuple[float, float | None]]) -> float | None:
    if rule in (RewardRule.WEIGHTED_MEAN, RewardRule.WEIGHTED_SUM):
        return weighted_sum(outcomes)
    values = [value for _, value in outcomes]
    return extreme(values, min if rule is RewardRule.MIN else max)


def _why_ungraded(evaluation: Evaluation | None) -> str | None:
    if evaluation is None:
        return DEADLINE
    if evaluation.not_graded is not None:
        return evaluation.not_graded
    return None if evaluation.has_reward else NO_REWARD


def _failure(trajectory: Trajectory, combined: CombinedReward) -> dict[str, Any]:
    if combined.error is None:
        return {}
    errors = [text for text in (trajectory.error, combined.error) if text]
    return {"status": TrajectoryStatus.ERROR, "error": "; ".join(errors)}


def provenance(
    trajectory: Trajectory,
    evaluations: Sequence[Evaluation],
    in_effect: Mapping[str, Evaluation],
    combined: CombinedReward,
) -> dict[str, Any]:
    """Where the reward came from. An evaluator's own metadata stays inside its entry: it overwrites nothing."""
    counting = counting_slots(trajectory.spec, in_effect)
    weights = {slot.evaluation.evaluation_id: slot.weight for slot in counting if slot.evaluation is not None}
    counted = [slot.evaluation for slot in combined.counted if slot.evaluation is not None]
    ids_in_effect = {evaluation.evaluation_id for evaluation in in_effect.values()}
    per_trace = combined.error is None and any(evaluation.trace_rewards is not None for evaluation in counted)
    return {
        "outcome_reward": combined.outcome,
        "trace_rewards": [trace.reward for trace in combined.traces] if per_trace else None,
        "rule": rule_name(trajectory.spec, counting),
        "shaping": SHAPED if combined.shaped else None,
        "evaluations": [
            {
                **_entry(evaluation),
                "share": weights.get(evaluation.evaluation_id),
                "stands": evaluation.evaluation_id in ids_in_effect,
            }
            for evaluation in evaluations
        ],
    }


def rule_name(spec: SessionSpec, counting: Sequence[CountingSlot]) -> str:
    """A mean of one evaluation is that evaluation, so it is named ``single``."""
    if spec.reward_rule is RewardRule.WEIGHTED_MEAN and len(counting) == 1:
        return SINGLE
    return spec.reward_rule.value


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
    "verdict",
    "components",
    "metadata",
)


def _entry(evaluation: Evaluation) -> dict[str, Any]:
    values = {name: getattr(evaluation, name) for name in ENTRY}
    rewards = evaluation.trace_rewards
    return {**values, "trace_rewards": None if rewards is None else list(rewards)}
