"""Makes the record of a call and writes it; nothing is "recorded" before the log has acknowledged it (rules S1, S4).

`Call` is a call as it begins, `CallResult` what became of it, `completion_record` makes the record of both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import structlog

from rollmill.codec import MSGPACK, encode
from rollmill.errors import RollmillError
from rollmill.models import (
    CallKind,
    CallStatus,
    CompletionRecord,
    PolicyVersion,
    SampledChoice,
    VersionRuns,
    total_length,
)
from rollmill.runtime.claim_check import ClaimCheck, StorageUnreachableError
from rollmill.runtime.telemetry.clock import Clock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policies import AnnouncedVersions, version_span
from rollmill_capture.event_log.event_writer import EventWriter
from rollmill_capture.model_config import VersionSource
from rollmill_capture.proxy.call_metrics import CallMetrics
from rollmill_capture.proxy.record_size import fitting_bytes, skeleton
from rollmill_capture.proxy.upstream_request import UpstreamRequest
from rollmill_capture.upstream.capabilities import EngineCapabilities
from rollmill_capture.upstream.client import Target
from rollmill_capture.upstream.formats.parsed_reply import LogProbs, ParsedChoice, ParsedReply, parser_failures


class RecordTooLargeError(RollmillError):
    """The record cannot be made to fit; what is left of it is in the log, the tokens are not."""


@dataclass(frozen=True)
class Call:
    """One call of an agent, as it begins."""

    session_id: str
    attempt: int
    completion_id: str
    """Chosen before the upstream is called (rule S1)."""
    kind: CallKind
    target: Target
    request: UpstreamRequest
    started_at: float
    announced: PolicyVersion
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CallResult:
    """What became of a call."""

    status: CallStatus
    parsed: ParsedReply = field(default_factory=ParsedReply)
    http_status: int | None = None
    error: str | None = None
    response: bytes | None = None
    """The engine's answer without ids, as JSON; None for a stream."""
    versions: VersionRuns | None = None
    """Of the one choice of a reply in several parts; None: the call's own version."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Recorder:
    event_writer: EventWriter
    announced: AnnouncedVersions
    clock: Clock
    metrics: Metrics
    engines: EngineCapabilities = field(default_factory=EngineCapabilities)
    """Learn from each reply what their engine can."""
    claims: ClaimCheck | None = None
    """Where large records are kept; None: in the log, made to fit."""
    _call_metrics: CallMetrics = field(init=False)

    def __post_init__(self) -> None:
        self._call_metrics = CallMetrics(self.metrics)

    def start(self, call: Call) -> Call:
        """The call as it goes to the engine now: its start and the version before it (rule R1)."""
        salt = self.cache_salt(call)
        request = call.request if salt is None else call.request.with_cache_salt(salt)
        newest = self.announced.newest(call.target.route.policy)
        return replace(call, started_at=self.clock.now(), announced=newest, request=request)

    def cache_salt(self, call: Call) -> str | None:
        """What ties the engine's prefix cache to its weights; None: the route does not ask for one."""
        route = call.target.route
        return f"{route.policy}@{self.announced.newest(route.policy)}" if route.cache_salt else None

    async def record(self, call: Call, result: CallResult) -> None:
        """Append the call's record. Raises NotAcknowledgedError and RecordTooLargeError."""
        newest = self.announced.newest(call.target.route.policy)
        result = self._mark_stale_cache(call, result)
        record = completion_record(call, result, ended_at=self.clock.now(), announced=newest)
        value = await self._encode(record)
        await self._append(record, encode(skeleton(record)) if value is None else value)
        self._call_metrics.count(call.target, call.request.model, record)
        if result.status is CallStatus.OK:
            request = call.request
            self.engines.observe(call.target, request.upstream_format, result.parsed, streamed=request.engine_streams)
        if value is None:
            raise RecordTooLargeError(f"the record of {call.completion_id} is over {COMPLETIONS.max_bytes} bytes")

    async def _encode(self, record: CompletionRecord) -> bytes | None:
        """The record as it goes to the log. While the storage of large values is away, it has to fit by itself."""
        value, limit = encode(record, MSGPACK), COMPLETIONS.max_bytes
        if self.claims is None:
            return _within(limit, record, value)
        whole = _within(self.claims.largest(COMPLETIONS), record, value)
        try:
            return None if whole is None else await self.claims.store(COMPLETIONS, whole)
        except StorageUnreachableError as error:
            self.metrics.count("blobs_not_stored")
            structlog.get_logger().warning(
                "a large record stays in the log", call=record.completion_id, error=str(error)
            )
            return _within(limit, record, whole)

    async def _append(self, record: CompletionRecord, value: bytes) -> None:
        started = time.perf_counter()
        try:
            await self.event_writer.append(COMPLETIONS, record.session_id, value)
        except RollmillError:
            self.metrics.count("not_acknowledged")
            raise
        self.metrics.observe("ack_seconds", time.perf_counter() - started)

    def _mark_stale_cache(self, call: Call, result: CallResult) -> CallResult:
        """Marked where its prompt was read from a cache that older weights may have filled."""
        route, cached = call.target.route, result.parsed.cached_tokens
        bound = route.cache_salt or route.version_source is VersionSource.FIXED
        if not cached or bound or not self.announced.caches_may_be_stale(route.policy):
            return result
        self.metrics.count("kv_maybe_stale", policy=route.policy)
        return replace(result, metadata={**result.metadata, "kv_maybe_stale": True, "cached_tokens": cached})


def completion_record(call: Call, result: CallResult, *, ended_at: float, announced: PolicyVersion) -> CompletionRecord:
    """The record of a call. ``announced`` is the newest announced version now, after the call."""
    parsed, request, route = result.parsed, call.request, call.target.route
    return CompletionRecord(
        session_id=call.session_id,
        attempt=call.attempt,
        completion_id=call.completion_id,
        started_at=call.started_at,
        ended_at=ended_at,
        kind=call.kind,
        status=result.status,
        http_status=result.http_status,
        error=result.error,
        model=parsed.model or request.model,
        policy=version_span(route, parsed.weight_versions, call.announced, announced),
        sampling=request.sampling_params(route.logprobs_mode),
        prompt_ids=parsed.prompt_ids,
        choices=tuple(_choice(call, result, choice) for choice in parsed.choices),
        usage_completion_tokens=None if parsed.usage is None else parsed.usage[1],
        fingerprint=route.fingerprint,
        original_request=request.original,
        request=request.body,
        response=result.response,
        metadata=_metadata(call, result),
    )


def _within(limit: int, record: CompletionRecord, value: bytes | None) -> bytes | None:
    """The encoded record ``value`` where it fits, else what `fitting_bytes` makes of the record."""
    return value if value is not None and len(value) <= limit else fitting_bytes(record, limit)


def _metadata(call: Call, result: CallResult) -> dict[str, Any]:
    request, metadata = call.request, {**call.metadata, **result.metadata}
    if request.added:
        metadata["added_fields"] = list(request.added)
    if request.ignored:
        metadata["ignored_fields"] = list(request.ignored)
    if request.fields.get("tools") and result.status is CallStatus.OK:  # without tools there is no parser at work
        signs = [sign for choice in result.parsed.choices for sign in parser_failures(choice.message)]
        metadata.update(dict.fromkeys(signs, True))
    return metadata


def _choice(call: Call, result: CallResult, choice: ParsedChoice) -> SampledChoice:
    reason, versions = _untrainable_reason(call, result, choice), result.versions
    return SampledChoice(
        index=choice.index,
        token_ids=choice.token_ids,
        logprobs=_known_logprobs(choice),
        message=choice.message,
        versions=versions if versions is not None and total_length(versions) == choice.tokens else None,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        trainable=reason is None,
        untrainable_reason=reason,
    )


def _known_logprobs(choice: ParsedChoice) -> LogProbs | None:
    """Log-probs that are not one known number per id mean nothing, also where there is no id at all."""
    found = choice.logprobs
    if found is None or choice.token_ids is None or len(found) != choice.tokens or np.isnan(found).any():
        return None
    return found


def _untrainable_reason(call: Call, result: CallResult, choice: ParsedChoice) -> str | None:
    if result.status is CallStatus.CLIENT_GONE:
        return result.status.value
    if not call.target.route.trainable:
        return "route_not_trainable"
    return result.parsed.untrainable_reason(choice)
