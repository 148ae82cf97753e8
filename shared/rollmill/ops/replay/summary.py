"""The results of a set of sessions in one run, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollmill.models import BatchHeader, Trajectory
from rollmill.ops.ledger import Balance, LedgerReader
from rollmill.ops.ledger.batch_header import batch_header
from rollmill.ops.replay.input_records import readable, records
from rollmill.ops.replay.selection import SessionAttempt
from rollmill.runtime.kafka.log_reader import Log
from rollmill.settings import KafkaSettings
from rollmill.topics import BATCHES, TRAJECTORIES


@dataclass(frozen=True)
class TrajectorySummary:
    """The newest revision of one trajectory."""

    revision: int
    status: str
    lengths: tuple[int, ...]
    """Tokens of prompt and response of each trace."""
    reward: float | None
    ungraded_reason: str | None

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectorySummary:
        lengths = tuple(len(trace.prompt_ids) + len(trace.response_ids) for trace in trajectory.traces)
        reward = trajectory.outcome_reward
        reason = None if trajectory.graded else trajectory.ungraded_reason or "unknown"
        return cls(trajectory.revision or 0, str(trajectory.status), lengths, reward, reason)


@dataclass
class StepSummary:
    """One step, from the header that all its micro-batches share."""

    tokens: int
    efficiency: float
    staleness: Mapping[int, int]

    @classmethod
    def of(cls, header: BatchHeader) -> StepSummary:
        return cls(header.denominators.tokens, header.packing_efficiency, header.staleness_histogram)


@dataclass
class Summary:
    """Numbers of one run; `as_json` gives those that are compared."""

    balance: Balance
    trajectories: dict[SessionAttempt, TrajectorySummary] = field(default_factory=dict)
    steps: dict[str, StepSummary] = field(default_factory=dict)
    """By batch id."""

    def take(self, trajectory: Trajectory) -> None:
        found, name = TrajectorySummary.of(trajectory), (trajectory.session_id, trajectory.attempt)
        if name not in self.trajectories or self.trajectories[name].revision <= found.revision:
            self.trajectories[name] = found

    def as_json(self) -> dict[str, Any]:
        lengths = [length for item in self.trajectories.values() for length in item.lengths]
        return {
            "trajectories": len(self.trajectories),
            "status": _counts(item.status for item in self.trajectories.values()),
            "traces": len(lengths),
            "trace_tokens": _spread(lengths),
            "rewards": self._rewards(),
            "tokens": self._tokens(),
            "steps": self._steps(),
        }

    def _rewards(self) -> dict[str, Any]:
        given = [item.reward for item in self.trajectories.values() if item.reward is not None]
        ungraded = _counts(item.ungraded_reason for item in self.trajectories.values() if item.ungraded_reason)
        mean, deviation = (float(np.mean(given)), float(np.std(given))) if given else (None, None)
        return {"graded": len(given), "mean": mean, "deviation": deviation, "ungraded": ungraded}

    def _tokens(self) -> dict[str, Any]:
        """The ledger's numbers, and the share of captured tokens that will never be trained."""
        found = self.balance.as_json()
        total = self.balance.total
        out = total.excluded.total() + total.dead_lettered.total()
        rate = out / total.captured if total.captured else None
        lengths = found["by_length"]
        return {
            **{name: found[name] for name in ("captured", "trained", "excluded", "dead_lettered", "pending")},
            "drop_rate": rate,
            "balanced": found["balanced"],
            "trained_share_by_length": {
                name: item["trained"] / item["captured"] for name, item in lengths.items() if item["captured"]
            },
        }

    def _steps(self) -> dict[str, Any]:
        steps = list(self.steps.values())
        ages: Counter[int] = Counter()
        for step in steps:
            ages.update(step.staleness)
        count = ages.total()
        return {
            "count": len(steps),
            "tokens": sum(step.tokens for step in steps),
            "packing_efficiency": float(np.mean([step.efficiency for step in steps])) if steps else None,
            "mean_staleness": sum(age * tokens for age, tokens in ages.items()) / count if count else None,
        }


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _spread(values: list[int]) -> dict[str, float | None]:
    if not values:
        return {"mean": None, "p50": None, "p95": None, "max": None}
    p50, p95 = np.percentile(values, [50, 95])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p95": float(p95), "max": float(max(values))}


async def summarize(settings: KafkaSettings, sessions: set[SessionAttempt]) -> Summary:
    """The summary of a prefix. Only ``sessions`` count, except that a step with one of them counts as a whole."""
    ledger = LedgerReader(settings, lambda session_id, attempt: (session_id, attempt) in sessions)
    summary = Summary(await ledger.look())
    async with Log.open(settings) as log:
        async for record in records(log, TRAJECTORIES):
            trajectory: Trajectory | None = readable(record)
            if trajectory is not None and (trajectory.session_id, trajectory.attempt) in sessions:
                summary.take(trajectory)
        async for raw in log.read(BATCHES):
            header = batch_header(raw.value or b"")
            if any((row.session_id, row.attempt) in sessions for row in header.table):
                summary.steps.setdefault(header.batch_id, StepSummary.of(header))
    return summary
