"""Writes down what became of calls; nothing is "recorded" before the log has acknowledged it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

import structlog

from rollmill.codec import encode
from rollmill.errors import RollmillError
from rollmill.models import CallKind, CallStatus, CompletionRecord, PolicyVersion, SampledChoice
from rollmill.runtime.claim_check import ClaimCheck, StorageUnreachableError
from rollmill.runtime.telemetry.clock import Clock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policy_versions import AnnouncedVersions
from rollmill_capture.event_log.event_writer import EventWriter
from rollmill_capture.proxy.completion_record import (
    Call,
    CallResult,
    completion_record,
    fitting_bytes,
    salted,
    skeleton,
)
from rollmill_capture.settings import VersionSource
from rollmill_capture.upstream.capabilities import EngineCapabilities
from rollmill_capture.upstream.formats.parsed_reply import EMPTY_ARGUMENTS, NOT_PARSED

MANY_AT_ZERO = 1000
LAST_REPLIES = 100
"""Over which the share of replies without ids is told."""
NO_IDS = frozenset({"no_ids", "completion_ids_missing", "prompt_ids_missing"})
MOST_WARNINGS = 1000
"""Clients choose the names of models; after so many different ones only the counters go on."""


class RecordTooLargeError(RollmillError):
    """The record cannot be made to fit; what is left of it is in the log, the tokens are not."""


@dataclass
class Recorder:
    sink: EventWriter
    announced: AnnouncedVersions
    clock: Clock
    metrics: Metrics
    engines: EngineCapabilities = field(default_factory=EngineCapabilities)
    """Learn from each reply what their engine can."""
    claims: ClaimCheck | None = None
    """Where large records are kept; None: in the log, made to fit."""
    _warned: set[str] = field(default_factory=set)
    _at_zero: int = 0
    _without_ids: deque[bool] = field(default_factory=lambda: deque(maxlen=LAST_REPLIES))

    def started(self, call: Call) -> Call:
        """The call as it goes to the engine now: its start and the version before it (rule R1)."""
        route = call.target.route
        newest = self.announced.newest(route.policy)
        salt = self.salt(call)
        served = call.served if salt is None else salted(call.served, salt)
        return replace(call, started_at=self.clock.now(), announced=newest, served=served)

    def salt(self, call: Call) -> str | None:
        """What ties the engine's prefix cache to its weights; None: the route asks for none."""
        route = call.target.route
        return f"{route.policy}@{self.announced.newest(route.policy)}" if route.cache_salt else None

    async def record(self, call: Call, ending: CallResult) -> None:
        """Append the call's record. Raises NotAcknowledgedError and RecordTooLargeError."""
        newest = self.announced.newest(call.target.route.policy)
        ending = self._with_cache(call, ending)
        record = completion_record(call, ending, ended_at=self.clock.now(), announced=newest)
        value = await self._fitting(record)
        await self._append(record, encode(skeleton(record)) if value is None else value)
        self._count(call, record)
        if ending.status is CallStatus.OK:
            served = call.served
            self.engines.observe(call.target, served.wire, ending.reading, streamed=served.streams)
        if value is None:
            raise RecordTooLargeError(f"the record of {call.completion_id} is over {COMPLETIONS.max_bytes} bytes")

    async def _fitting(self, record: CompletionRecord) -> bytes | None:
        """The record as it goes to the log. While the storage of large values is away, it has to fit by itself."""
        inside = COMPLETIONS.max_bytes
        if self.claims is None:
            return fitting_bytes(record, inside)
        value = fitting_bytes(record, self.claims.largest(COMPLETIONS))
        try:
            return None if value is None else await self.claims.store(COMPLETIONS, value)
        except StorageUnreachableError as error:
            self.metrics.count("blobs_not_stored")
            structlog.get_logger().warning(
                "a large record stays in the log", call=record.completion_id, error=str(error)
            )
            return value if value is not None and len(value) <= inside else fitting_bytes(record, inside)

    async def _append(self, record: CompletionRecord, value: bytes) -> None:
        started = time.perf_counter()
        try:
            await self.sink.append(COMPLETIONS, record.session_id, value)
        except RollmillError:
            self.metrics.count("not_acknowledged")
            raise
        self.metrics.observe("ack_seconds", time.perf_counter() - started)

    def _with_cache(self, call: Call, ending: CallResult) -> CallResult:
        """Marked where its prompt was read from a cache that older weights may have filled."""
        route, cached = call.target.route, ending.reading.cached_tokens
        bound = route.cache_salt or route.version_source is VersionSource.FIXED
        if not cached or bound or not self.announced.caches_may_be_stale(route.policy):
            return ending
        self.metrics.count("kv_maybe_stale", policy=route.policy)
        return replace(ending, metadata={**ending.metadata, "kv_maybe_stale": True, "cached_tokens": cached})

    def _watch_version(self, call: Call, record: CompletionRecord) -> None:
        """Trained calls that stay at version 0 for ever: nobody announces, or under another name."""
        route = call.target.route
        if (
            record.policy.before != PolicyVersion()
            or not route.trainable
            or route.version_source is VersionSource.FIXED
        ):
            return
        self.metrics.count("calls_at_version_zero", policy=route.policy)
        self._at_zero += 1
        if self._at_zero == MANY_AT_ZERO:
            structlog.get_logger().warning(
                "no version of the policy was ever announced", policy=route.policy, calls=MANY_AT_ZERO
            )

    def _count(self, call: Call, record: CompletionRecord) -> None:
        self._watch_version(call, record)
        self.metrics.count("calls", status=record.status.value, kind=record.kind.value)
        for sign in (EMPTY_ARGUMENTS, NOT_PARSED):
            if record.metadata.get(sign):
                self.metrics.count("parser_failures", sign=sign)
        if record.status is CallStatus.OK and record.kind is CallKind.AGENT and call.target.route.trainable:
            self._without_ids.append(any(_kind(choice) in NO_IDS for choice in record.choices))
            self.metrics.gauge("ids_missing_ratio", sum(self._without_ids) / len(self._without_ids))
        for choice in record.choices:
            tokens = 0 if choice.token_ids is None else len(choice.token_ids)
            self.metrics.count("sampled_tokens", tokens)
            if choice.untrainable_reason is not None and record.status is CallStatus.OK:
                self._count_untrainable(call, choice.untrainable_reason, _kind(choice))

    def _count_untrainable(self, call: Call, reason: str, kind: str) -> None:
        """Counted by the reason without its numbers; the first one of a kind and model is worth a warning."""
        self.metrics.count("untrainable_replies", reason=kind)
        if kind in NO_IDS:
            self.metrics.count("ids_missing")
        model = call.served.model
        if f"{kind} {model}" not in self._warned and len(self._warned) < MOST_WARNINGS:
            self._warned.add(f"{kind} {model}")
            structlog.get_logger().warning(
                "a reply cannot be trained",
                reason=reason,
                model=model,
                upstream=call.target.base_url,
                session=call.session_id,
            )


def _kind(choice: SampledChoice) -> str:
    """Why a reply is not trained, without the numbers; empty: it is."""
    return (choice.untrainable_reason or "").partition(":")[0].partition("(")[0]
