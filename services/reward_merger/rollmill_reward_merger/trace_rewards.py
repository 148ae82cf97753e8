"""The rewards that one evaluation gives each trace, and where inside the trace they are given. Pure.

A trace's reward is its trace reward; without trace rewards, the outcome; with neither, the sum of all inside it.
Rewards inside (turn rewards at a turn's last token, token rewards) are added to the others. Where any evaluation gives
some, all rewards go to tokens: a trace reward to the trace's last sampled token, an outcome, once, to the last sampled
token of the last trace (`SHAPED`). So the returns of a rollout's tokens count every reward once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollmill.models import Evaluation, Trace

SHAPED = "rest_at_last_sampled_token"
"""Name of this rule in the provenance."""

TRACES, TURNS, TOKENS = "trace_count_mismatch", "turn_count_mismatch", "token_count_mismatch"

TokenValues = npt.NDArray[np.float64]
"""[r], over the response tokens of a trace."""


class Mismatch(NamedTuple):
    """An evaluation that does not fit its trajectory."""

    reason: str
    detail: str


@dataclass(frozen=True)
class TraceReward:
    """Of one trace. ``tokens`` (float64 [r]) and ``turns`` are None where no reward is given inside."""

    reward: float | None
    tokens: TokenValues | None = None
    turns: tuple[float | None, ...] | None = None


def is_shaped(evaluation: Evaluation) -> bool:
    return evaluation.turn_rewards is not None or evaluation.token_rewards is not None


def trace_rewards(traces: Sequence[Trace], evaluation: Evaluation, *, shaped: bool) -> tuple[TraceReward, ...]:
    """One for each trace; the evaluation has to fit them (`find_mismatch`).

    ``shaped``: rewards go to the tokens, because this or another evaluation gives some inside.
    """
    rewards = _rewards(traces, evaluation)
    if not shaped:
        return tuple(TraceReward(reward) for reward in rewards)
    inside = [_inside(index, trace, evaluation) for index, trace in enumerate(traces)]
    turns = evaluation.turn_rewards or (None,) * len(traces)
    if evaluation.outcome_reward is None and evaluation.trace_rewards is None:
        given = zip(traces, inside, turns, strict=True)
        return tuple(TraceReward(float(values.sum()), values, turn) for _, values, turn in given)
    for index, amount in _end_rewards(traces, evaluation):
        inside[index][_last_sampled(traces[index])] += amount
    return tuple(TraceReward(reward, values, turn) for reward, values, turn in zip(rewards, inside, turns, strict=True))


def find_mismatch(traces: Sequence[Trace], evaluation: Evaluation) -> Mismatch | None:
    """Why the evaluation does not fit the traces; None where it does."""
    return next(_mismatches(traces, evaluation), None)


def _mismatches(traces: Sequence[Trace], evaluation: Evaluation) -> Iterator[Mismatch]:
    subject = f"evaluator {evaluation.evaluator} returned"
    for name in ("trace_rewards", "turn_rewards", "token_rewards"):
        given = getattr(evaluation, name)
        if given is not None and len(given) != len(traces):
            yield Mismatch(TRACES, f"{subject} {len(given)} {name} but the trajectory has {len(traces)} traces")
    for index, found, count in _uneven(evaluation.turn_rewards, [len(trace.turns) for trace in traces]):
        yield Mismatch(TURNS, f"{subject} {found} turn_rewards for trace {index} but it has {count} turns")
    for index, found, count in _uneven(evaluation.token_rewards, [len(trace.response_ids) for trace in traces]):
        yield Mismatch(TOKENS, f"{subject} {found} token_rewards for trace {index} but it has {count} response tokens")


def _uneven(given: Sequence[Sequence[Any] | None] | None, counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(trace, given, needed) where they differ."""
    for index, (values, count) in enumerate(zip(given or (), counts, strict=False)):
        if values is not None and len(values) != count:
            yield index, len(values), count


def _rewards(traces: Sequence[Trace], evaluation: Evaluation) -> tuple[float | None, ...]:
    """Trace rewards take precedence over the outcome; an outcome applies to every trace."""
    if evaluation.trace_rewards is not None:
        return evaluation.trace_rewards
    return (evaluation.outcome_reward,) * len(traces)


def _inside(index: int, trace: Trace, evaluation: Evaluation) -> TokenValues:
    values = np.zeros(len(trace.response_ids), np.float64)
    tokens = None if evaluation.token_rewards is None else evaluation.token_rewards[index]
    if tokens is not None:
        values += np.array(tokens, np.float64)
    turns = None if evaluation.turn_rewards is None else evaluation.turn_rewards[index]
    for turn, reward in zip(trace.turns, turns or (), strict=False):
        if reward is not None and turn.stop > turn.start:
            values[turn.stop - 1] += reward
    return values


def _end_rewards(traces: Sequence[Trace], evaluation: Evaluation) -> Iterator[tuple[int, float]]:
    """Index of each trace that gets a reward at its end, its own or the rollout's, and the amount."""
    filled = [index for index, trace in enumerate(traces) if len(trace.response_ids)]
    if evaluation.trace_rewards is not None:
        given = evaluation.trace_rewards
        yield from ((index, given[index] or 0.0) for index in filled)
    elif evaluation.outcome_reward is not None and filled:
        yield filled[-1], evaluation.outcome_reward


def _last_sampled(trace: Trace) -> int:
    sampled = np.flatnonzero(trace.loss_mask)
    return int(sampled[-1]) if len(sampled) else len(trace.response_ids) - 1
