"""What a spec may ask for: the operator's maxima, at capture and in the evaluator."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from rollmill.codec import CONTENT_TYPE, MSGPACK, decode, encode
from rollmill.errors import InvalidInputError
from rollmill.models import Evaluation, EvaluatorSpec, SessionSpec, SessionStatus, Trajectory
from rollmill.models.spec_maxima import SpecMaxima
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.strategies import EvaluationContext, ResourceClass, evaluator_registry, validate_session_spec
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.samples.trajectories import sample_trace
from rollmill.testing.tables import CaughtUp
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream
from rollmill_evaluator.consumer.in_flight import ReceivedRecord
from rollmill_evaluator.delivery.record_handler import RecordHandler
from rollmill_evaluator.grading import EvaluationLimits, Grader

TESTS: dict[str, Any] = {
    "source": "calc",
    "test_command": "true",
    "expected": {"fail_to_pass": ["a"], "pass_to_pass": []},
}
MSGPACK_HEADERS = ((CONTENT_TYPE, MSGPACK.encode()),)
LIMITS = EvaluationLimits(seconds=20.0, attempts=1, retry_seconds=0.0, bytes=2**20)


def sandboxed(**resources: Any) -> dict[str, Any]:
    return {"strategy": "test_on_output", "config": {**TESTS, "resources": resources}}


def composite(*parts: dict[str, Any], name: str = "whole") -> dict[str, Any]:
    return {"strategy": "composite", "name": name, "config": {"parts": list(parts)}}


def nested(depth: int) -> dict[str, Any]:
    spec: dict[str, Any] = {"strategy": "session_completed"}
    for _ in range(depth - 1):
        spec = composite(spec)
    return spec


def wide(levels: int, each: int) -> dict[str, Any]:
    if not levels:
        return {"strategy": "session_completed"}
    return composite(*({**wide(levels - 1, each), "name": f"p{number}"} for number in range(each)))


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


TOO_MUCH: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    **{
        name: ({"evaluators": [sandboxed(**{name: 10**9})]}, (f"evaluators.0.config.resources.{name}", "1000000000"))
        for name in (
            *("memory_mib", "address_space_mib", "disk_mib", "output_kib", "processes"),
            *("test_seconds", "prepare_seconds"),
        )
    },
    "deadline_seconds": ({"deadline_seconds": 1e9}, ("deadline_seconds", "1000000000")),
    "idle_seconds": ({"idle_seconds": 1e9}, ("idle_seconds", "1000000000")),
    "evaluation_seconds": ({"evaluation_seconds": 1e9}, ("evaluation_seconds", "1000000000")),
    "group_size": ({"group_size": 10**9}, ("group_size", "1000000000")),
    "metadata": ({"metadata": {"a": "x" * 70_000}}, ("metadata", "70008 bytes", "65536")),
    "evaluators": (
        {"evaluators": [{"strategy": "external", "name": f"e{number}"} for number in range(400)]},
        ("evaluators", "64"),
    ),
    "parts count": ({"evaluators": [wide(3, 20)]}, ("evaluators", "64")),
    "depth": ({"evaluators": [nested(40)]}, ("evaluators", "9 inside of each other", "8")),
    "a part's memory": (
        {"evaluators": [composite({"strategy": "session_completed"}, composite(sandboxed(memory_mib=4096)))]},
        ("evaluators.0.config.parts.1.config.parts.0.config.resources.memory_mib", "4096", "2048"),
    ),
    "nested metadata": ({"metadata": deep(300)}, ("nested too deep",)),
    "nested config": ({"evaluators": [{"strategy": "session_completed", "config": deep(300)}]}, ("nested too deep",)),
}


async def opened(spec: dict[str, Any], **settings: Any) -> tuple[int, Any, int]:
    """Status and body of opening a session, and the number of records that it wrote."""
    events = MemoryEventWriter()
    app = assemble(
        CaptureParts(
            settings=CaptureSettings(**settings),
            sessions=SessionTable(),
            position=CaughtUp(),
            announced=AnnouncedVersions(),
            event_writer=events,
            upstream=Upstream(httpx.AsyncClient()),
            clock=ManualClock(1000.0),
            metrics=Metrics("capture"),
        )
    )
    async with AsgiCall(app, "POST", "/v1/sessions", json.dumps({"session_id": "s1", **spec}).encode()) as call:
        body = await call.json()
        return call.status, body, len(events.appended)


@pytest.mark.parametrize("name", TOO_MUCH)
async def test_f5_a_session_that_asks_for_too_much_is_not_opened(name: str) -> None:
    spec, parts = TOO_MUCH[name]
    status, body, appended = await opened(spec)
    assert status == 422
    assert [part for part in parts if part not in body["error"]["message"]] == []
    assert appended == 0


async def test_f5_what_is_within_the_maxima_is_opened() -> None:
    most = SpecMaxima()
    resources = {name: getattr(most, name) for name in ("memory_mib", "disk_mib", "output_kib", "processes")}
    spec = {"deadline_seconds": most.deadline_seconds, "evaluators": [sandboxed(**resources), nested(8)]}
    status, _, appended = await opened(spec)
    assert (status, appended) == (201, 2)


async def test_f5_the_operator_sets_the_maxima() -> None:
    status, body, _ = await opened({"evaluators": [sandboxed(memory_mib=4096)]}, spec_maxima={"memory_mib": 4096})
    assert status == 201
    status, body, _ = await opened({"evaluators": [sandboxed()]}, spec_maxima={"memory_mib": 512})
    assert status == 422
    assert "2048 is above the operator's maximum of 512" in body["error"]["message"]


def test_f5_maxima_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_SPEC_MAXIMA", '{"memory_mib": 77}')
    assert CaptureSettings().spec_maxima == SpecMaxima(memory_mib=77)
    monkeypatch.setenv("ROLLMILL_SPEC_MAXIMA", '{"memory": 77}')
    with pytest.raises(ValidationError, match="memory"):
        CaptureSettings()


def test_f5_a_record_that_asks_for_too_much_stays_readable() -> None:
    spec = SessionSpec(deadline_seconds=1e9, evaluators=(EvaluatorSpec(**sandboxed(memory_mib=10**9)),))
    validate_session_spec(spec)
    assert decode(Trajectory, encode(session(spec)), MSGPACK_HEADERS) == session(spec)


def session(spec: SessionSpec) -> Trajectory:
    return Trajectory(
        session_id="s1",
        status=SessionStatus.COMPLETED,
        spec=spec,
        output=b'{"patch":"x"}',
        traces=(sample_trace("s1", prompt_messages=b'[{"role":"user"}]', index=0),),
    )


async def published(*evaluators: dict[str, Any]) -> list[Evaluation]:
    """What the evaluator publishes of a session that came by Kafka."""
    sent: list[bytes] = []

    async def publish(_: str, value: bytes) -> None:
        sent.append(value)

    grader = Grader(evaluator_registry(), LIMITS, ManualClock(1.0), EvaluationContext(deadline_seconds=0.0))
    handler = RecordHandler(
        grader=grader, publish=publish, metrics=Metrics("evaluator"), partitions=1, concurrency=4,
        resource_class=ResourceClass.LIGHT,
    )  # fmt: skip
    spec = SessionSpec(evaluators=tuple(EvaluatorSpec(**evaluator) for evaluator in evaluators))
    await handler.handle(ReceivedRecord(0, 0, encode(session(spec)), MSGPACK_HEADERS))
    handler.resource_class = ResourceClass.SANDBOX
    await handler.handle(ReceivedRecord(0, 1, encode(session(spec)), MSGPACK_HEADERS))
    return [Evaluation.model_validate_json(value) for value in sent]


@pytest.mark.parametrize(
    "evaluator",
    [sandboxed(memory_mib=10**9), sandboxed(output_kib=10**9), composite(sandboxed(processes=10**9)), nested(120)],
    ids=["memory", "output", "part", "depth"],
)
async def test_f5_what_came_by_kafka_and_asks_for_too_much_is_not_graded(evaluator: dict[str, Any]) -> None:
    [evaluation] = await published(evaluator)
    assert evaluation.not_graded == "above_maximum"
    assert "above the operator's maximum" in evaluation.metadata["error"]


async def test_f5_too_many_evaluators_that_came_by_kafka_are_not_run() -> None:
    many = [{"strategy": "session_completed", "name": f"e{number}"} for number in range(65)]
    assert {evaluation.not_graded for evaluation in await published(*many)} == {"above_maximum"}


def test_f5_metadata_that_is_no_json_is_refused_and_not_a_failure() -> None:
    with pytest.raises(InvalidInputError, match="JSON"):
        validate_session_spec(SessionSpec(metadata=deep(300)), SpecMaxima())
