"""What one evaluation says of each trace: its reward, and what was earned where inside of it. Pure.

A trace's reward is its trace reward; without trace rewards, the outcome; with neither, the sum of what is given inside.
What is given inside (turn rewards at a turn's last token, token rewards) is on top of the others. Where any of it is
given, all of it goes to the tokens: a trace reward to the trace's last sampled token, an outcome, once, to the last
sampled token of the last trace (`SHAPED`). So the returns of a rollout's tokens count everything once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollmill.models import Evaluation, Trace

SHAPED = "rest_at_last_sampled_token"
"""Name of the rule, kept with the rewards."""

TRACES, TURNS, TOKENS = "trace_count_mismatch", "turn_count_mismatch", "token_count_mismatch"

Values = npt.NDArray[np.float64]


class Mismatch(NamedTuple):
    """An evaluation that does not fit its trajectory."""

    reason: str
    detail: str


@dataclass(frozen=True)
class TraceReward:
    """Of one trace. ``tokens`` [r] float64 and ``turns`` are None where nothing is given inside."""

    reward: float | None
    tokens: Values | None = None
    turns: tuple[float | None, ...] | None = None


def is_shaped(evaluation: Evaluation) -> bool:
    return evaluation.turn_rewards is not None or evaluation.token_rewards is not None


def words(traces: Sequence[Trace], evaluation: Evaluation, *, shaped: bool) -> tuple[TraceReward, ...]:
    """One word per trace; the evaluation has to fit them (`mismatch`).

    ``shaped``: rewards go to the tokens, because this or another evaluation gives some inside.
    """
    rewards = _rewards(traces, evaluation)
    if not shaped:
        return tuple(TraceReward(reward) for reward in rewards)
    inside = [_inside(place, trace, evaluation) for place, trace in enumerate(traces)]
    turns = evaluation.turn_rewards or (None,) * len(traces)
    if evaluation.outcome_reward is None and evaluation.trace_rewards is None:
        given = zip(traces, inside, turns, strict=True)
        return tuple(TraceReward(float(values.sum()), values, turn) for _, values, turn in given)
    for place, amount in _at_the_ends(traces, evaluation):
        inside[place][_last_sampled(traces[place])] += amount
    return tuple(TraceReward(reward, values, turn) for reward, values, turn in zip(rewards, inside, turns, strict=True))


def mismatch(traces: Sequence[Trace], evaluation: Evaluation) -> Mismatch | None:
    """Why the evaluation does not fit the traces; None: it does."""
    return next(_mismatches(traces, evaluation), None)


def _mismatches(traces: Sequence[Trace], evaluation: Evaluation) -> Iterator[Mismatch]:
    who = f"evaluator {evaluation.evaluator} returned"
    for name in ("trace_rewards", "turn_rewards", "token_rewards"):
        given = getattr(evaluation, name)
        if given is not None and len(given) != len(traces):
            yield Mismatch(TRACES, f"{who} {len(given)} {name} but the trajectory has {len(traces)} traces")
    for place, found, count in _uneven(evaluation.turn_rewards, [len(trace.turns) for trace in traces]):
        yield Mismatch(TURNS, f"{who} {found} turn_rewards for trace {place} but it has {count} turns")
    for place, found, count in _uneven(evaluation.token_rewards, [len(trace.response_ids) for trace in traces]):
        yield Mismatch(TOKENS, f"{who} {found} token_rewards for trace {place} but it has {count} response tokens")


def _uneven(given: Sequence[Sequence[Any] | None] | None, counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(trace, given, needed) where they differ."""
    for place, (values, count) in enumerate(zip(given or (), counts, strict=False)):
        if values is not None and len(values) != count:
            yield place, len(values), count


def _rewards(traces: Sequence[Trace], evaluation: Evaluation) -> tuple[float | None, ...]:
    """Trace rewards win over the outcome; one outcome is broadcast."""
    if evaluation.trace_rewards is not None:
        return evaluation.trace_rewards
    return (evaluation.outcome_reward,) * len(traces)


def _inside(place: int, trace: Trace, evaluation: Evaluation) -> Values:
    values = np.zeros(len(trace.response_ids), np.float64)
    tokens = None if evaluation.token_rewards is None else evaluation.token_rewards[place]
    if tokens is not None:
        values += np.array(tokens, np.float64)
    turns = None if evaluation.turn_rewards is None else evaluation.turn_rewards[place]
    for turn, reward in zip(trace.turns, turns or (), strict=False):
        if reward is not None and turn.stop > turn.start:
            values[turn.stop - 1] += reward
    return values


def _at_the_ends(traces: Sequence[Trace], evaluation: Evaluation) -> Iterator[tuple[int, float]]:
    """Where the rewards of whole traces and of the rollout are given: (trace, amount)."""
    filled = [place for place, trace in enumerate(traces) if len(trace.response_ids)]
    if evaluation.trace_rewards is not None:
        given = evaluation.trace_rewards
        yield from ((place, given[place] or 0.0) for place in filled)
    elif evaluation.outcome_reward is not None and filled:
        yield filled[-1], evaluation.outcome_reward


def _last_sampled(trace: Trace) -> int:
    sampled = np.flatnonzero(trace.loss_mask)
    return int(sampled[-1]) if len(sampled) else len(trace.response_ids) - 1
