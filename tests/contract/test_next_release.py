"""What the next release may write: every record with one more field, at the top and in each record within it.

This release reads it, carries the field on where it writes the same record again, and decides as it does without it.
What people write stays checked name by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import msgpack
import orjson
import pytest
from pydantic import Field, ValidationError

from rollmill.cli.generate.schemas import event_models
from rollmill.codec import CONTENT_TYPE, JSON, MSGPACK, decode, encode
from rollmill.errors import InvalidInputError, PoisonRecordError
from rollmill.models import (
    CompletionEvent,
    CompletionRecord,
    EvalResult,
    Evaluation,
    EvaluatorSpec,
    PolicyAnnouncement,
    PolicyVersion,
    Record,
    SessionClosed,
    SessionOpened,
    SessionRecord,
    SessionSpec,
    StepAcknowledged,
    TrainerEvent,
    Trajectory,
)
from rollmill.runtime.claim_check.reference import BlobReference
from rollmill.strategies import BaseTrajectoryBuilder, StrategyRegistry
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.batches import SampleTrace, step_values
from rollmill.testing.samples.sessions import completion
from rollmill.testing.samples.trajectories import sample_trajectory
from rollmill.topics import (
    ACKS,
    BATCHES,
    BUILT,
    COMPLETIONS,
    CUTS,
    EVALUATIONS,
    POLICIES,
    REGISTRY,
    TRAJECTORIES,
    partition_of,
)
from rollmill.trainer.batches.state import StreamState
from rollmill.trainer.layouts.safetensors_reader import read_batch
from rollmill_batcher.groups.config import BatcherConfig, GroupRules, Learning, Size
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.steps.advantages import Grpo
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder
from rollmill_builder.sessions.session_state import OpenSession
from rollmill_builder.stage import BuilderStage
from rollmill_builder.storage.call_parts import call_digest, content_digest
from rollmill_capture.http.rewards import RewardRequest
from rollmill_capture.http.session_requests import read_close_request, read_open_request
from rollmill_evaluator.evaluators.composite import CompositeEvaluator
from rollmill_evaluator.remote.http import HttpEvaluator, parse_result
from rollmill_evaluator.result_validation import InvalidResultError, validated_result
from rollmill_reward_merger.stage import RewardMergerStage
from rollmill_reward_merger.timers import Windows

SCHEMAS = Path(__file__).parents[2] / "schemas"
EXAMPLES = sorted((SCHEMAS / "examples").glob("*.json"))
HEADERS = {each: ((CONTENT_TYPE, each.encode()),) for each in (JSON, MSGPACK)}
ADDED = "added_later"
VALUE = {"numbers": [1, 0.5, None], "text": "new"}
PARTITIONS = 4
HOME = partition_of(b"s1", PARTITIONS)
NOW = 1000.0


def grown(value: Any) -> Any:
    """A record as the next release writes it."""
    if isinstance(value, Record):
        fields = {name: grown(getattr(value, name)) for name in type(value).model_fields}
        return value.model_copy(update={**fields, ADDED: VALUE})
    return tuple(map(grown, value)) if type(value) is tuple else value


def records_in(value: object) -> int:
    """How many records ``value`` is made of, itself included."""
    if isinstance(value, Record):
        return 1 + sum(records_in(getattr(value, name)) for name in type(value).model_fields)
    return sum(map(records_in, value)) if type(value) is tuple else 0


def plain(value: Any) -> Any:
    """A record without unknown fields."""
    if isinstance(value, Record):
        fields = {name: plain(getattr(value, name)) for name in type(value).model_fields}
        return type(value).model_validate(fields)
    return tuple(map(plain, value)) if type(value) is tuple else value


def grown_payload(payload: bytes) -> bytes:
    """A changelog's update as the next release writes it; what is no object has no room for a field."""
    if payload[:1] == b"{":
        return orjson.dumps({**orjson.loads(payload), ADDED: VALUE})
    try:
        found = msgpack.unpackb(payload)
    except ValueError:
        return payload
    packed: bytes = msgpack.packb({**found, ADDED: VALUE}) if isinstance(found, dict) else payload
    return packed


def restart_on_grown_changelog(task: MemoryTask[Any]) -> None:
    task.changelog = {key: grown_payload(payload) for key, payload in task.changelog.items()}
    assert any(ADDED.encode() in payload for payload in task.changelog.values())
    task.restart()


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_nt05_every_record_is_read_with_fields_added_everywhere_and_keeps_them(
    example: Path, content_type: str
) -> None:
    event = example.name.partition(".")[0]
    model = event_models()[event]
    before: Record = decode(model, example.read_bytes(), HEADERS[JSON])
    written = encode(grown(before), content_type)
    read: Record = decode(model, written, HEADERS[content_type])
    assert type(read) is type(before)
    assert plain(read) == before
    assert read == grown(before)
    assert read != before
    assert encode(read.replace(), content_type) == written
    assert encode(read, JSON).count(f'"{ADDED}"'.encode()) == records_in(before)
    schema = orjson.loads((SCHEMAS / f"{event}.v1.schema.json").read_bytes())
    jsonschema.Draft202012Validator(schema).validate(orjson.loads(encode(read, JSON)))


def test_nt05_every_topic_with_a_model_has_an_example_here() -> None:
    names = {path.name.partition(".")[0] for path in EXAMPLES}
    assert {topic.schema for topic in REGISTRY if topic.model is not None} <= names


def test_unknown_bytes_are_base64_in_json_and_bytes_again_in_messagepack() -> None:
    read = decode(SessionSpec, msgpack.packb({ADDED: b"\xff\x00"}))
    assert orjson.loads(encode(read, JSON))[ADDED] == "_wA="
    assert decode(SessionSpec, encode(read)) == read


def builder_task() -> MemoryTask[Any]:
    classes: dict[str, type[BaseTrajectoryBuilder]] = {"prefix_merging": PrefixMergingBuilder}
    registry = StrategyRegistry("builder", BaseTrajectoryBuilder, classes)  # type: ignore[type-abstract]  # only for subclass checks
    return MemoryTask(BuilderStage(registry=registry, partitions=PARTITIONS, late_window=100.0), partition=HOME)


SESSION = (
    SessionOpened(session_id="s1", at=NOW, spec=SessionSpec(evaluators=(EvaluatorSpec(strategy="reported"),))),
    completion("c1", [1, 2, 3], [4, 5], at=NOW + 1),
    completion("c2", [1, 2, 3, 4, 5, 6], [7, 8], at=NOW + 2),
    SessionClosed(session_id="s1", reward=1.0, at=NOW + 3),
)


def built(task: MemoryTask[Any]) -> Trajectory:
    (record,) = task.of(BUILT)
    assert isinstance(record.value, bytes)
    trajectory: Trajectory = decode(Trajectory, record.value, HEADERS[MSGPACK])
    return trajectory


def test_nt05_the_builder_keeps_the_fields_of_calls_and_of_the_session() -> None:
    usual, task = builder_task(), builder_task()
    for event in SESSION:
        usual.feed(COMPLETIONS, event, key="s1")
        task.feed(COMPLETIONS, encode(grown(event)), key="s1")
        if isinstance(event, CompletionRecord):
            state = task.state.get("s1:1")
            assert isinstance(state, OpenSession)
            assert state.records()[-1].model_extra == {ADDED: VALUE}
            task.feed(COMPLETIONS, event, key="s1")
            assert task.counts["duplicates"] == usual.counts["completions"], "an older client sent it again"
            restart_on_grown_changelog(task)
    assert task.dead_letters == []
    assert plain(built(task)) == built(usual)
    assert built(task).spec == grown(SESSION[0]).spec
    restart_on_grown_changelog(task)
    task.feed(COMPLETIONS, SESSION[1], key="s1")
    assert task.counts["duplicates"] == 3, "the marker of the closed session was restored"


def test_nt05_a_field_added_to_a_call_leaves_its_digest_as_release_0_1_0_has_it_in_its_state() -> None:
    """A field that is not used must not make a call that is sent again another one: leave it out by ``exclude_if``."""
    fields = {
        "session_id": "s1",
        "completion_id": "c1",
        "started_at": 1.0,
        "ended_at": 2.0,
        "model": "toy",
        "policy": {"before": [0, 3], "after": [0, 4]},
        "sampling": {"temperature": 0.7},
        "prompt_ids": [1, 2, 3],
        "choices": [
            {
                "token_ids": [4, 5],
                "logprobs": [-0.5, -0.25],
                "versions": [[[0, 3], 2]],
                "message": {"role": "assistant", "content": "x"},
                "finish_reason": "stop",
            }
        ],
        "request": {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.7},
        "metadata": {"k": [1]},
    }
    record = CompletionRecord.model_validate(fields)
    assert call_digest(record)[0].hex() == "8ef66fe8adf7f1cc431ce2aecdb88beb"
    assert call_digest(grown(record))[0].hex() == "8ef66fe8adf7f1cc431ce2aecdb88beb"


def test_a_field_that_is_absent_while_unused_changes_neither_encoding_nor_digest() -> None:
    class Later(SessionClosed):
        note: str | None = Field(default=None, exclude_if=lambda value: value is None)

    before, later = SessionClosed(session_id="s1"), Later(session_id="s1")
    assert encode(later) == encode(before)
    assert content_digest(later) == content_digest(before)
    noted = Later(session_id="s1", note="new")
    assert content_digest(noted) != content_digest(before)
    assert decode(SessionClosed, encode(noted)).model_extra == {"note": "new"}


def merger_task() -> MemoryTask[Any]:
    windows = Windows(revisions=600.0, markers=3600.0, orphans=7200.0)
    return MemoryTask(RewardMergerStage(partitions=PARTITIONS, windows=windows), partition=HOME)


@pytest.mark.parametrize("restart", [False, True])
def test_nt05_a_built_record_of_a_newer_builder_is_merged_as_without_it_and_its_fields_go_on(*, restart: bool) -> None:
    builder = builder_task()
    for event in SESSION:
        builder.feed(COMPLETIONS, event, key="s1")
    trajectory = built(builder)
    judged = Evaluation(evaluation_id="e1", session_id="s1", evaluator="reported", outcome_reward=1.0, at=NOW + 4)
    usual, task = merger_task(), merger_task()
    usual.feed(BUILT, trajectory)
    usual.feed(EVALUATIONS, judged)
    task.feed(BUILT, encode(grown(trajectory)))
    if restart:
        restart_on_grown_changelog(task)
    task.feed(EVALUATIONS, grown(judged))
    assert task.dead_letters == []
    (expected,), (record,) = usual.of(TRAJECTORIES), task.of(TRAJECTORIES)
    assert isinstance(expected.value, bytes)
    assert isinstance(record.value, bytes)
    merged: Trajectory = decode(Trajectory, record.value, HEADERS[MSGPACK])
    assert merged == grown(decode(Trajectory, expected.value, HEADERS[MSGPACK]))
    assert merged.outcome_reward == 1.0
    task.feed(EVALUATIONS, judged)
    assert task.counts["duplicates"] == 1, "unknown fields are no part of an evaluation's identity"


def batcher_task() -> MemoryTask[Any]:
    config = BatcherConfig(
        run="run",
        policy="policy",
        learning=Learning("grpo", Grpo(scale="none")),
        groups=GroupRules(deadline_seconds=60.0, late_window_seconds=600.0),
        groups_per_step=1,
        micro_batch=Size(64, 4096),
    )
    return MemoryTask(BatcherStage(config))


def test_nt05_the_batcher_cuts_the_same_batch_from_records_with_more_fields() -> None:
    usual, task = batcher_task(), batcher_task()
    announced = PolicyAnnouncement(version=PolicyVersion(0, 3), at=1.0)
    members = [sample_trajectory(f"g-{name}", reward, group="g") for name, reward in (("a", 1.0), ("b", 0.0))]
    usual.feed(POLICIES, announced)
    task.feed(POLICIES, grown(announced))
    for member in members:
        usual.feed(TRAJECTORIES, member)
        task.feed(TRAJECTORIES, encode(grown(member)))
    restart_on_grown_changelog(task)
    for each in (usual, task):
        each.punctuate(200.0)
    assert task.dead_letters == []
    assert [record.value for record in task.of(BATCHES)] == [record.value for record in usual.of(BATCHES)] != []
    restart_on_grown_changelog(task)
    done = StepAcknowledged(run="run", rank=0, world_size=1, step=0, batch_id="b", at=201.0)
    task.feed(ACKS, grown(done))
    usual.feed(ACKS, done)
    assert dict(task.state.items()).keys() == dict(usual.state.items()).keys()
    assert len(task.of(CUTS)) == 1


def test_nt05_a_batch_with_a_field_more_in_its_header_is_read() -> None:
    ((value,),) = step_values(0, [[[SampleTrace("a")]]])
    before = read_batch(value)
    size = int.from_bytes(value[:8], "little")
    layout = orjson.loads(value[8 : 8 + size])
    layout["__metadata__"]["header"] = encode(grown(before.header), JSON).decode()
    text = orjson.dumps(layout)
    after = read_batch(len(text).to_bytes(8, "little") + text + value[8 + size :])
    assert after.header == grown(before.header)
    assert after.input_ids.tolist() == before.input_ids.tolist()


def test_nt05_a_checkpoint_and_a_reference_of_a_newer_release_are_read() -> None:
    state = StreamState(run="run", next_step=3, offsets={"0": 7}, world_size=1)
    assert StreamState.read(grown(state).dump()) == grown(state)
    reference = BlobReference.to(b"content", MSGPACK)
    head, _, fields = reference.encode().partition(b":")
    longer = orjson.dumps({**orjson.loads(fields), ADDED: 1})
    assert BlobReference.decode(head + b":" + longer) == reference


@pytest.mark.parametrize("kind", [CompletionEvent, TrainerEvent, SessionRecord])
def test_nt05_a_record_of_an_unknown_type_is_refused_by_name(kind: Any) -> None:
    fields = {"session_id": "s1", "state": "open", "spec": {}, "opened_at": 1.0, "run": "run", "at": 1.0}
    with pytest.raises(PoisonRecordError, match=r"invalid.*'session_forked'"):
        decode(kind, orjson.dumps({"type": "session_forked", **fields}), HEADERS[JSON])


def test_nt05_an_event_of_an_unknown_type_is_one_dead_letter() -> None:
    task = builder_task()
    task.feed(COMPLETIONS, b'{"type":"session_forked","session_id":"s1"}', key="s1")
    task.feed(COMPLETIONS, SESSION[0], key="s1")
    assert [error.reason for _, error in task.dead_letters] == ["invalid"]
    assert task.counts["sessions_opened"] == 1


def test_what_json_cannot_represent_is_refused_in_an_unknown_field_too() -> None:
    task = builder_task()
    task.feed(COMPLETIONS, msgpack.packb({**SESSION[1].model_dump(), ADDED: msgpack.Timestamp(1)}), key="s1")
    assert [error.reason for _, error in task.dead_letters] == ["invalid"]


def test_a_name_that_is_no_field_is_refused_in_python_at_every_depth() -> None:
    with pytest.raises(ValidationError, match="outcome_rewrd"):
        EvalResult(outcome_rewrd=1.0)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match=r"evaluators\.0\.wieght"):
        SessionSpec(evaluators=[{"strategy": "reported", "wieght": 2.0}])


def test_a_name_that_is_no_field_is_refused_in_requests_at_every_depth() -> None:
    with pytest.raises(InvalidInputError, match="did you mean 'group_size'"):
        read_open_request({"group_sise": 4})
    with pytest.raises(InvalidInputError, match=r"evaluators\.0\.wieght: .* did you mean 'weight'"):
        read_open_request({"evaluators": [{"strategy": "reported", "wieght": 2.0}]})
    with pytest.raises(InvalidInputError, match="did you mean 'reward'"):
        read_close_request({"rewrd": 1.0})
    with pytest.raises(ValidationError, match="evalutor"):
        RewardRequest.validate_strictly({"outcome_reward": 1.0, "evalutor": "me"})


def test_a_name_that_is_no_field_is_refused_in_configs_and_results_of_evaluators() -> None:
    with pytest.raises(ValueError, match="wieght"):
        CompositeEvaluator(parts=[{"strategy": "reported", "wieght": 2.0}])
    with pytest.raises(ValueError, match="timeout_secs"):
        HttpEvaluator(url="http://127.0.0.1/", timeout_secs=1)
    with pytest.raises(Exception, match="outcome_rewrd"):
        parse_result(b'{"outcome_rewrd": 1.0}')
    with pytest.raises(InvalidResultError, match="outcome_rewrd"):
        validated_result(EvalResult.model_validate({"outcome_rewrd": 1.0}))
