"""How evaluations become rewards.

Whose word counts. An evaluation fills the slot of its evaluator, or the slot of the evaluation that it supersedes;
the last word in a slot stands. Where the session's spec names evaluators, exactly their slots count (weight 0: awaited
and kept, never counted). Where the spec names none, every slot counts with weight 1. What does not count is kept as
provenance all the same.

What it gives. The counting words are combined by the spec's rule (`combining`), each trace by itself (`words`), and the
outcomes likewise; an outcome is None where one that is needed is missing. Zero is a value; None is not.

What it refuses. Another number of trace, turn or token rewards than there are traces, turns or tokens makes the session
an ERROR. A counting slot that is empty, not graded, or without any reward leaves the whole rollout ungraded, with that
slot's reason; the rules ``first`` and ``last`` pass over it while another is graded. So does a result that float32
cannot hold.
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
from rollmill_reward_merger.combining import OutOfRangeError, combine, extreme, weighted
from rollmill_reward_merger.trace_rewards import SHAPED, TraceReward, is_shaped, mismatch, words

DEADLINE = "deadline"
NO_EVALUATOR = "no_evaluator"
NO_REWARD = "no_reward"
OUT_OF_RANGE = "reward_out_of_range"
SINGLE = "single"
FALLBACKS = (RewardRule.FIRST, RewardRule.LAST)


@dataclass(frozen=True)
class Counting:
    """One slot that counts: what stands in it, and its share; of a mean all shares sum to 1, else it is the weight."""

    share: float
    evaluation: Evaluation | None


@dataclass(frozen=True)
class Verdict:
    """What the counting evaluations give together."""

    traces: tuple[TraceReward, ...]
    outcome: float | None = None
    ungraded_reason: str | None = None
    error: str | None = None
    counted: tuple[Counting, ...] = ()
    """Those whose words it is made of."""

    @property
    def shaped(self) -> bool:
        return any(word.tokens is not None for word in self.traces)


def merge(trajectory: Trajectory, evaluations: Sequence[Evaluation]) -> Trajectory:
    """``trajectory`` with rewards, provenance and, where no reward came, the reason.

    ``evaluations``: everything said of the session so far, in the order of the evaluations partition.
    """
    standing = last_words(evaluations)
    counting = counting_slots(trajectory.spec, standing)
    verdict = judge(trajectory, counting)
    rewarded = tuple(rewarded_trace(trace, word) for trace, word in zip(trajectory.traces, verdict.traces, strict=True))
    return trajectory.replace(
        traces=rewarded,
        evaluation=provenance(trajectory, evaluations, standing, verdict) if evaluations else None,
        ungraded_reason=verdict.ungraded_reason,
        **_failure(trajectory, verdict),
    )


def rewarded_trace(trace: Trace, word: TraceReward) -> Trace:
    """``trace`` with what is said of it, in float32 where tokens are meant."""
    if word.tokens is None:
        return trace.replace(reward=word.reward)
    turns = trace.turns
    if word.turns is not None:
        turns = tuple(turn.replace(reward=reward) for turn, reward in zip(turns, word.turns, strict=True))
    return trace.replace(reward=word.reward, token_rewards=word.tokens.astype(np.float32), turns=turns)


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
    """The evaluation that stands in each slot, in the order in which they were said."""
    slot_of = slots(evaluations)
    standing: dict[str, Evaluation] = {}
    for item in evaluations:
        if not is_timer(item):
            standing.pop(slot_of[item.evaluation_id], None)
            standing[slot_of[item.evaluation_id]] = item
    return standing


def counting_slots(spec: SessionSpec, standing: Mapping[str, Evaluation]) -> list[Counting]:
    """The slots that count, in the order of the spec, else by name; by the rule ``last``, the last to speak first."""
    if spec.evaluators:
        weights = {evaluator.label: evaluator.weight for evaluator in spec.evaluators if evaluator.weight > 0}
    else:
        weights = dict.fromkeys(sorted(standing), 1.0)
    if spec.reward_rule is RewardRule.WEIGHTED_MEAN:
        weights = _normalised(weights)
    if spec.reward_rule is RewardRule.LAST:
        spoken = [slot for slot in reversed(tuple(standing)) if slot in weights]
        weights = {slot: weights[slot] for slot in (*spoken, *weights)}
    return [Counting(weight, standing.get(slot)) for slot, weight in weights.items()]


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    """Shares that sum to 1, however large or small the weights."""
    largest = max(weights.values(), default=1.0)
    total = math.fsum(weight / largest for weight in weights.values())
    return {slot: weight / largest / total for slot, weight in weights.items()}


def judge(trajectory: Trajectory, counting: Sequence[Counting]) -> Verdict:
    """The rewards that the counting slots give."""
    traces = trajectory.traces
    nothing = (TraceReward(None),) * len(traces)
    if not counting:
        return Verdict(nothing, ungraded_reason=NO_EVALUATOR)
    for item in counting:
        unfit = None if item.evaluation is None else mismatch(traces, item.evaluation)
        if unfit is not None:
            return Verdict(nothing, ungraded_reason=unfit.reason, error=unfit.detail)
    chosen = _chosen(trajectory.spec.reward_rule, counting)
    for item in chosen:
        if (reason := _why_ungraded(item.evaluation)) is not None:
            return Verdict(nothing, ungraded_reason=reason)
    try:
        return _combined(trajectory.spec.reward_rule, traces, chosen)
    except OutOfRangeError:
        return Verdict(nothing, ungraded_reason=OUT_OF_RANGE)


def _chosen(rule: RewardRule, counting: Sequence[Counting]) -> Sequence[Counting]:
    """Whose words are combined: all, or by a rule of one the first graded, else the first of all."""
    if rule not in FALLBACKS:
        return counting
    graded = [item for item in counting if _why_ungraded(item.evaluation) is None]
    return (graded or counting)[:1]


def _combined(rule: RewardRule, traces: Sequence[Trace], chosen: Sequence[Counting]) -> Verdict:
    graded = [(item.share, item.evaluation) for item in chosen if item.evaluation is not None]
    shaped = any(is_shaped(evaluation) for _, evaluation in graded)
    said = [(share, words(traces, evaluation, shaped=shaped)) for share, evaluation in graded]
    per_trace = tuple(combine(rule, [(share, each[place]) for share, each in said]) for place in range(len(traces)))
    outcome = _outcome(rule, [(share, evaluation.outcome_reward) for share, evaluation in graded])
    silent = outcome is None and all(word.reward is None for word in per_trace) and len(traces) > 0
    reason = NO_REWARD if silent else None
    return Verdict(per_trace, outcome, ungraded_reason=reason, counted=tuple(chosen))


def _outcome(rule: RewardRule, parts: Sequence[tuple[float, float | None]]) -> float | None:
    if rule in (RewardRule.WEIGHTED_MEAN, RewardRule.WEIGHTED_SUM):
        return weighted(parts)
    values = [value for _, value in parts]
    return extreme(values, min if rule is RewardRule.MIN else max)


def _why_ungraded(evaluation: Evaluation | None) -> str | None:
    if evaluation is None:
        return DEADLINE
    if evaluation.not_graded is not None:
        return evaluation.not_graded
    return None if evaluation.has_reward else NO_REWARD


def _failure(trajectory: Trajectory, verdict: Verdict) -> dict[str, Any]:
    if verdict.error is None:
        return {}
    errors = [text for text in (trajectory.error, verdict.error) if text]
    return {"status": TrajectoryStatus.ERROR, "error": "; ".join(errors)}


def provenance(
    trajectory: Trajectory, evaluations: Sequence[Evaluation], standing: Mapping[str, Evaluation], verdict: Verdict
) -> dict[str, Any]:
    """Where the reward came from. An evaluator's own metadata stays inside its entry: it overwrites nothing."""
    counting = counting_slots(trajectory.spec, standing)
    shares = {item.evaluation.evaluation_id: item.share for item in counting if item.evaluation is not None}
    counted = [item.evaluation for item in verdict.counted if item.evaluation is not None]
    stands = {evaluation.evaluation_id for evaluation in standing.values()}
    per_trace = verdict.error is None and any(item.trace_rewards is not None for item in counted)
    return {
        "outcome_reward": verdict.outcome,
        "trace_rewards": [word.reward for word in verdict.traces] if per_trace else None,
        "rule": rule_of(trajectory.spec, counting),
        "shaping": SHAPED if verdict.shaped else None,
        "evaluations": [
            {
                **_entry(evaluation),
                "share": shares.get(evaluation.evaluation_id),
                "stands": evaluation.evaluation_id in stands,
            }
            for evaluation in evaluations
        ],
    }


def rule_of(spec: SessionSpec, counting: Sequence[Counting]) -> str:
    """The mean of one is its word."""
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
