"""What recorded calls are counted as, and the warnings that the first of a kind is worth."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import structlog

from rollmill.models import CallKind, CallStatus, CompletionRecord, PolicyVersion, SampledChoice
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill_capture.model_config import Route, VersionSource
from rollmill_capture.upstream.client import Target
from rollmill_capture.upstream.formats.parsed_reply import EMPTY_ARGUMENTS, NOT_PARSED

MANY_AT_ZERO = 1000
LAST_REPLIES = 100
"""Over which the share of replies without ids is measured."""
NO_IDS = frozenset({"no_ids", "completion_ids_missing", "prompt_ids_missing"})
MOST_WARNINGS = 1000
"""Clients choose the names of models; after so many different ones only the counters go on."""


@dataclass
class CallMetrics:
    metrics: Metrics
    _warned: set[str] = field(default_factory=set)
    _at_zero: int = 0
    _without_ids: deque[bool] = field(default_factory=lambda: deque(maxlen=LAST_REPLIES))

    def count(self, target: Target, model: str | None, record: CompletionRecord) -> None:
        """Count a record that was acknowledged. ``model``: as the client names it."""
        self._count_version(target.route, record)
        self.metrics.count("calls", status=record.status.value, kind=record.kind.value)
        for sign in (EMPTY_ARGUMENTS, NOT_PARSED):
            if record.metadata.get(sign):
                self.metrics.count("parser_failures", sign=sign)
        if record.status is CallStatus.OK and record.kind is CallKind.AGENT and target.route.trainable:
            self._without_ids.append(any(_reason(choice) in NO_IDS for choice in record.choices))
            self.metrics.gauge("ids_missing_ratio", sum(self._without_ids) / len(self._without_ids))
        for choice in record.choices:
            tokens = 0 if choice.token_ids is None else len(choice.token_ids)
            self.metrics.count("sampled_tokens", tokens)
            if choice.untrainable_reason is not None and record.status is CallStatus.OK:
                self._count_untrainable(target, model, record, choice)

    def _count_version(self, route: Route, record: CompletionRecord) -> None:
        """Trained calls that stay at version 0 for ever: versions are not announced, or under another name."""
        trained = route.trainable and route.version_source is not VersionSource.FIXED
        if record.policy.before != PolicyVersion() or not trained:
            return
        self.metrics.count("calls_at_version_zero", policy=route.policy)
        self._at_zero += 1
        if self._at_zero == MANY_AT_ZERO:
            structlog.get_logger().warning(
                "no version of the policy was ever announced", policy=route.policy, calls=MANY_AT_ZERO
            )

    def _count_untrainable(
        self, target: Target, model: str | None, record: CompletionRecord, choice: SampledChoice
    ) -> None:
        """Counted by the reason without its numbers; the first one of a reason and model is worth a warning."""
        reason = _reason(choice)
        self.metrics.count("untrainable_replies", reason=reason)
        if reason in NO_IDS:
            self.metrics.count("ids_missing")
        if f"{reason} {model}" not in self._warned and len(self._warned) < MOST_WARNINGS:
            self._warned.add(f"{reason} {model}")
            structlog.get_logger().warning(
                "a reply cannot be trained",
                reason=choice.untrainable_reason,
                model=model,
                upstream=target.base_url,
                session=record.session_id,
            )


def _reason(choice: SampledChoice) -> str:
    """Why a reply is not trained, without the numbers; empty: it is."""
    return (choice.untrainable_reason or "").partition(":")[0].partition("(")[0]
