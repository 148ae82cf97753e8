"""Each kind of bad input becomes a dead letter with reason and source position, and the next record is processed."""

from __future__ import annotations

import orjson
import pytest

from rollmill.codec import decode, encode
from rollmill.models import SessionStatus, Trace, Trajectory
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.testing.topic_log import dead_letter_info, produce, read, running
from rollmill.topics import BUILT, COMPLETIONS, DEAD_LETTERS, TRAJECTORIES
from rollmill_builder.app import build as build_builder
from rollmill_builder.settings import BuilderSettings
from rollmill_reward_merger.app import build as build_merger
from rollmill_reward_merger.settings import RewardMergerSettings

pytestmark = pytest.mark.kafka

MIB = 2**20


@pytest.fixture
def address(kafka_broker: EmbeddedKafka, topic_prefix: str) -> dict[str, str]:
    return {"bootstrap_servers": kafka_broker.bootstrap_servers, "prefix": topic_prefix}


def event(kind: str, **fields: object) -> bytes:
    return orjson.dumps({"type": kind, "session_id": "s", **fields})


def completion(name: str, logprobs: list[float], **fields: object) -> bytes:
    choice = {"token_ids": [7, 9], "logprobs": logprobs, "finish_reason": "stop"}
    return event("completion", completion_id=name, prompt_ids=[1, 2], choices=[choice], **fields)


GOOD = completion("good", [-0.5, -0.25])

BAD_EVENTS = [
    ("malformed", b'{"type": "completion", "session_id": '),
    (
        "invalid",
        event("completion", completion_id="c", prompt_ids=[1], choices=[{"token_ids": [7], "logprobs": [0, 0]}]),
    ),
    ("malformed", GOOD.replace(b"-0.25", b"NaN")),
    ("invalid", GOOD.replace(b"-0.25", b'"-0.25"')),
    ("invalid", event("no_such_event")),
    ("unknown_strategy", event("session_opened", spec={"builder": {"strategy": "prefix_mergign"}})),
    ("too_large", completion("huge", [-0.5, -0.25], request={"messages": [{"content": "x" * (8 * MIB)}]})),
]


async def test_bad_events_are_set_aside_and_the_session_goes_on(address: dict[str, str]) -> None:
    settings = BuilderSettings.model_validate({**address, "partitions": 2, "poll_ms": 20})
    await apply_topics(settings)
    closing = event("session_closed")
    await produce(settings, COMPLETIONS, [("s", bad) for _, bad in BAD_EVENTS] + [("s", GOOD), ("s", closing)])
    async with running(settings, build_builder(settings).stages):
        built = await read(settings, BUILT, 1)
        letters = await read(settings, DEAD_LETTERS, len(BAD_EVENTS))
    infos = [dead_letter_info(letter) for letter in letters]
    assert [info.reason for info in infos] == [reason for reason, _ in BAD_EVENTS]
    assert [(info.topic, info.offset) for info in infos] == [("completions", n) for n in range(len(BAD_EVENTS))]
    assert [letter.value for letter in letters] == [bad for _, bad in BAD_EVENTS]
    (trace,) = decode(Trajectory, built[0].value, tuple(built[0].headers)).traces
    assert trace.response_ids.tolist() == [7, 9]


async def test_a_mask_longer_than_its_ids_never_reaches_a_batch(address: dict[str, str]) -> None:
    settings = RewardMergerSettings.model_validate({**address, "partitions": 2, "poll_ms": 20})
    await apply_topics(settings)
    trace = Trace.model_validate(
        {"prompt_ids": [1], "response_ids": [7, 9], "loss_mask": [1, 1], "response_logprobs": [-1, -1]}
    )
    good = encode(Trajectory(session_id="s", status=SessionStatus.COMPLETED, traces=(trace,)), "application/json")
    bad = good.replace(b'"loss_mask":[1,1]', b'"loss_mask":[1,1,1]')
    await produce(settings, BUILT, [("s", bad), ("s", good)])
    async with running(settings, build_merger(settings).stages):
        assert len(await read(settings, TRAJECTORIES, 1)) == 1
        (letter,) = await read(settings, DEAD_LETTERS, 1)
    info = dead_letter_info(letter)
    assert (info.reason, info.topic, info.offset) == ("invalid", "built", 0)
    assert "3 values for 2 response_ids" in info.error
