"""Traces and trajectories: what a session became (topics ``built`` and ``trajectories``)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, TypeAdapter, field_validator, model_validator

from rollmill.models.base import (
    EventTime,
    FiniteFloat,
    Identifier,
    JsonBytes,
    LogProbs,
    LossMask,
    NonNegativeInt,
    PositiveInt,
    Record,
    TokenIds,
    Values,
)
from rollmill.models.completion import SessionStatus
from rollmill.models.extras import Extra
from rollmill.models.specs import SessionSpec
from rollmill.models.token_accounting import Manifest, TokenRange
from rollmill.models.versions import PolicyVersion, VersionRuns, total_length, trained_versions

TrajectoryStatus = SessionStatus


class TraceTurn(Record):
    """Where one sampled reply is in a trace: response tokens ``start`` to ``stop`` (exclusive)."""

    completion_id: Identifier
    choice: NonNegativeInt = 0
    start: NonNegativeInt
    stop: NonNegativeInt
    finish_reason: str | None = None
    trained: bool = True
    """False: the reply is context with mask 0; ``reason`` says why."""
    reason: str | None = None
    context_exact: bool = True
    """False: the next turn saw a re-tokenised copy of this reply, not its ids (rule A10)."""
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    """Log-probs before or after temperature and sampling filters; None is not known."""
    reward: FiniteFloat | None = None
    """Reward of this turn alone; None where turns are not graded."""


class Trace(Record):
    """One contiguous token sequence made from one or more completions of a session.

    Everything after the first prompt is the response. ``response_ids`` [r] int32, ``loss_mask`` [r] uint8
    (1 = sampled and trained), ``response_logprobs`` [r] float32 (0.0 where the mask is 0), ``versions`` run
    lengths over [r] (None for context). All at token.
    """

    prompt_ids: TokenIds
    response_ids: TokenIds
    loss_mask: LossMask
    response_logprobs: LogProbs | None = None
    """None: unknown; then no token may have mask 1."""
    versions: VersionRuns = ()
    turns: tuple[TraceTurn, ...] = ()
    prompt_messages: JsonBytes | None = None
    response_messages: JsonBytes | None = None
    tools: JsonBytes | None = None
    finish_reason: str | None = None
    """Of the last turn."""
    reward: FiniteFloat | None = None
    """Set by the reward-merger; None is ungraded, never 0.0."""
    token_rewards: Values | None = None
    """[r] float32; None where no single token is graded."""
    extras: dict[Identifier, Extra] = Field(default_factory=dict)
    """Further values by name, each [r, ...], such as log-probs of a reference model, float32 [r], or the experts that
    were taken, uint8 [r, layers, k]: handed to the trainer."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """``break_reason``, ``parent``, ``branch``, ``drift`` and what a builder adds."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        count = len(self.response_ids)
        for name in ("loss_mask", "response_logprobs", "token_rewards"):
            array = getattr(self, name)
            if array is not None and len(array) != count:
                raise ValueError(f"{name} has {len(array)} values for {count} response_ids")
        for name, array in self.extras.items():
            if len(array) != count:
                raise ValueError(f"extras {name!r} has {len(array)} values for {count} response_ids")
        if total_length(self.versions) not in (0, count):
            raise ValueError(f"versions cover {total_length(self.versions)} tokens of {count}")
        if self.response_logprobs is None and self.loss_mask.any():
            raise ValueError("tokens with loss_mask 1 need response_logprobs")
        return self

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def fingerprint(self) -> str | None:
        """Digest of tokenizer, chat template and model (rule A10); None where capture's route names none."""
        found = self.metadata.get("fingerprint")
        return found if isinstance(found, str) else None

    @property
    def versions_trained(self) -> dict[PolicyVersion, int]:
        return trained_versions(self.versions, self.loss_mask)

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """Over the trainable tokens; None where there is none."""
        return min(self.versions_trained, default=None)

    def units(self) -> tuple[TokenRange, ...]:
        """The trainable token ranges, split where the version changes."""
        starts = list(accumulate((run.length for run in self.versions), initial=0))
        return tuple(unit for turn in self.turns if turn.trained for unit in self._units_of(turn, starts))

    def _units_of(self, turn: TraceTurn, starts: list[int]) -> Iterator[TokenRange]:
        """``starts``: where each run of versions begins, and the end of the last."""
        for place in range(bisect_right(starts, turn.start) - 1, len(self.versions)):
            version = self.versions[place].version
            low, high = max(starts[place], turn.start), min(starts[place + 1], turn.stop)
            if low >= high:
                return
            if version is not None:
                yield TokenRange(turn.completion_id, turn.choice, low - turn.start, high - turn.start, version)


class ExcludedUnits(Record):
    """Sampled tokens that no trace trains, with the reason code."""

    reason: str
    units: tuple[TokenRange, ...]

    @property
    def tokens(self) -> int:
        return sum(unit.tokens for unit in self.units)


_REWARD: TypeAdapter[float | None] = TypeAdapter(FiniteFloat | None)


class Trajectory(Record):
    """A session with an end: a status and zero or more traces; rewards once merged."""

    session_id: Identifier
    attempt: PositiveInt = 1
    status: TrajectoryStatus
    spec: SessionSpec = SessionSpec()
    opened_at: EventTime = 0.0
    closed_at: EventTime = 0.0
    error: str | None = None
    output: JsonBytes | None = None
    reported_reward: FiniteFloat | None = None
    traces: tuple[Trace, ...] = ()
    excluded: tuple[ExcludedUnits, ...] = ()
    revision: NonNegativeInt | None = None
    """None in ``built``; counted from 0 in ``trajectories`` (rule M1)."""
    evaluation: dict[str, Any] | None = None
    """Provenance of the reward; None before the merge and for sessions without evaluators."""
    ungraded_reason: str | None = None
    """Why no reward came: ``no_evaluator``, ``deadline``, or the evaluator's own reason."""
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("evaluation")
    @classmethod
    def _reward_is_a_number(cls, evaluation: dict[str, Any] | None) -> dict[str, Any] | None:
        _REWARD.validate_python((evaluation or {}).get("outcome_reward"), strict=True)
        return evaluation

    @property
    def group_id(self) -> str:
        """The group; a session without one is its own group."""
        return self.spec.group_id or self.session_id

    @property
    def manifest(self) -> Manifest:
        units = tuple(unit for trace in self.traces for unit in trace.units())
        return Manifest(session_id=self.session_id, attempt=self.attempt, units=units)

    @property
    def graded(self) -> bool:
        return any(trace.reward is not None for trace in self.traces)

    @property
    def trained_tokens(self) -> int:
        return sum(trace.trained_tokens for trace in self.traces)

    @property
    def outcome_reward(self) -> float | None:
        """The rollout's reward (rule A6): the outcome, else the mask-weighted mean of its graded traces."""
        outcome = (self.evaluation or {}).get("outcome_reward")
        if outcome is not None:
            return float(outcome)
        graded = [(trace.reward, trace.trained_tokens) for trace in self.traces if trace.reward is not None]
        weight = sum(tokens for _, tokens in graded)
        if not weight:
            return float(np.mean([reward for reward, _ in graded])) if graded else None
        return sum(reward * tokens for reward, tokens in graded) / weight
