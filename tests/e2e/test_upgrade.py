"""Release 0.1.0 and this tree on one Kafka: what one has left behind the other restores and finishes.

The services of the first run are killed with sessions open, trajectories that wait for an evaluation, groups that wait
for members, a step that nobody has trained, and calls in capture's spool. The services of the second run take over
their topics and their spool. Both orders: an upgrade, and the way back. And both at once, as in a rolling upgrade.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollmill.codec import JSON, encode
from rollmill.models import Evaluation
from rollmill.ops.ledger import read_balance, settled_balance
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import BrokerConfig, EmbeddedKafka
from rollmill.runtime.supervisor import free_port
from rollmill.settings import KafkaSettings
from rollmill.testing.http.stub_http_server import StubReply, stub_http_server
from rollmill.testing.processes import ServiceProcess, service_process
from rollmill.testing.topic_log import produce, read
from rollmill.topics import BUILT, COMPLETIONS, CUTS, DEAD_LETTERS, EVALUATIONS, TRAJECTORIES
from rollmill.trainer import BatchStream

pytestmark = [pytest.mark.kafka, pytest.mark.e2e]

WHEEL = Path(__file__).parents[1] / "fixtures" / "wheels" / "rollmill-0.1.0-py3-none-any.whl"
SHARED_STAGES = ("builder", "reward_merger")
"""Of each, one process of either release may run half of the tasks."""
STAGES = (*SHARED_STAGES, "evaluator", "batcher")
MEMBERS, TURNS, TOKENS, GROUPS_PER_STEP, STEPS = 4, 3, 5, 3, 3
CUT, WAITING, SHORT, UNGRADED, OPEN, SPOOLED, NEW = range(3), 3, 4, 5, 6, 7, 8
"""Groups by what the first run leaves of them: cut into a step; whole; one member short; without an evaluation; with
sessions that still run; with calls in the spool; not begun."""
REPORTED = [group for group in range(GROUPS_PER_STEP * STEPS + 1) if group != UNGRADED]
CAPTURED = GROUPS_PER_STEP * STEPS * MEMBERS * TURNS * TOKENS
WAIT = 90.0

WHICH = """
from importlib.metadata import entry_points
import rollmill
print(rollmill.__file__, entry_points(group="rollmill.builders")["per_request"].value)
"""

Environment = Mapping[str, str]
Event = dict[str, Any]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Of a process that runs release 0.1.0: its packages and its entry points come before this tree's."""
    folder = tmp_path_factory.mktemp("earlier")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-c", WHICH]
    found = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [
        str(folder / "rollmill" / "__init__.py"),
        "rollmill_builder.per_request:PerRequestBuilder",
    ]
    return environment


def calls(session: str, now: float) -> list[Event]:
    """Every prompt is the one before, its reply, and one new token: the calls make one trace."""
    prompt, made = [1, 2, 3], []
    for turn in range(TURNS):
        reply = list(range(10 + turn, 10 + turn + TOKENS))
        choice = {"token_ids": reply, "logprobs": [-0.5] * TOKENS, "finish_reason": "stop"}
        same = {"type": "completion", "session_id": session, "completion_id": f"{session}-{turn}"}
        made.append({**same, "started_at": now, "ended_at": now + 0.5, "prompt_ids": prompt, "choices": [choice]})
        prompt = [*prompt, *reply, 4]
    return made


def name(group: int, member: int) -> str:
    return f"g{group}-m{member}"


def spec(group: int) -> Event:
    evaluator = "external" if group == UNGRADED else "reported"
    return {"group_id": f"g{group}", "group_size": MEMBERS, "evaluators": [{"strategy": evaluator}]}


def beginning(group: int, member: int, turns: int = TURNS) -> list[Event]:
    session, now = name(group, member), time.time()
    opened = {"type": "session_opened", "session_id": session, "at": now, "spec": spec(group)}
    return [opened, *calls(session, now)[:turns]]


def ending(group: int, member: int, turns: int = TURNS) -> list[Event]:
    session, now = name(group, member), time.time()
    reward = {} if group == UNGRADED else {"reward": float(member % 2)}
    closed = {"type": "session_closed", "session_id": session, "at": now, **reward}
    return [*calls(session, now)[turns:], closed]


def whole(group: int, members: Iterable[int] = range(MEMBERS)) -> list[Event]:
    return [event for member in members for event in (*beginning(group, member), *ending(group, member))]


@dataclass
class Run:
    """The services as one release runs them, on the topics and the spool that both share."""

    settings: KafkaSettings
    environment: Environment
    spool: Path
    engine: str

    @asynccontextmanager
    async def stages(self, services: Iterable[str] = STAGES, half: int | None = None) -> AsyncIterator[None]:
        """``half``: process 0 or 1 of two, of the stages that have as many tasks as there are partitions."""
        share = {} if half is None else {"ROLLMILL_PROCESSES": "2", "ROLLMILL_PROCESS_INDEX": str(half)}
        batcher = {"ROLLMILL_GROUPS_PER_STEP": str(GROUPS_PER_STEP), "ROLLMILL_MAX_STALENESS": "none"}
        async with AsyncExitStack() as stack:
            for service in services:
                environment = {**self._kafka(), **batcher, "ROLLMILL_HEALTH_PORT": str(free_port())}
                environment |= share if service in SHARED_STAGES else {}
                await stack.enter_async_context(service_process(f"rollmill_{service}", environment))
            yield

    @asynccontextmanager
    async def capture(self) -> AsyncIterator[tuple[ServiceProcess, httpx.AsyncClient]]:
        port = free_port()
        environment = {
            **self._kafka(),
            "ROLLMILL_PORT": str(port),
            "ROLLMILL_HEALTH_PORT": str(free_port()),
            "ROLLMILL_UPSTREAM": self.engine,
            "ROLLMILL_SPOOL_DIR": str(self.spool),
            "ROLLMILL_SPOOL_AFTER_SECONDS": "0.5",
        }
        async with service_process("rollmill_capture", environment) as process:
            await process.wait_for_log(b"capture listens")
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT) as http:
                yield process, http

    async def produce(self, events: Iterable[Event]) -> None:
        await produce(
            self.settings, COMPLETIONS, [(event["session_id"], json.dumps(event).encode()) for event in events]
        )

    def _kafka(self) -> dict[str, str]:
        return {
            **self.environment,
            "ROLLMILL_BOOTSTRAP_SERVERS": self.settings.bootstrap_servers,
            "ROLLMILL_PREFIX": self.settings.prefix,
            "ROLLMILL_PARTITIONS": str(self.settings.partitions),
            "ROLLMILL_BATCH_PARTITIONS": "1",
        }


def engine_reply(turn: int) -> StubReply:
    """The reply of `calls` to that turn, as vLLM gives it."""
    call = calls("any", 0.0)[turn]
    (choice,) = call["choices"]
    body = {
        "id": f"r{turn}",
        "model": "toy",
        "prompt_token_ids": call["prompt_ids"],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "reply"},
                "finish_reason": "stop",
                "token_ids": choice["token_ids"],
                "logprobs": {"content": [{"token": "t", "logprob": value} for value in choice["logprobs"]]},
            }
        ],
        "usage": {"prompt_tokens": len(call["prompt_ids"]), "completion_tokens": TOKENS},
    }
    return StubReply(body=json.dumps(body).encode())


async def call(http: httpx.AsyncClient, member: int, turn: int) -> None:
    """One call of the group `SPOOLED`; the engine reads the turn from the last message."""
    body = {"model": "toy", "messages": [{"role": "user", "content": str(turn)}]}
    reply = await http.post(f"/sessions/{name(SPOOLED, member)}/v1/chat/completions", json=body)
    assert reply.status_code == httpx.codes.OK, reply.text


async def each_calls(http: httpx.AsyncClient, turn: int) -> None:
    await asyncio.gather(*(call(http, member, turn) for member in range(MEMBERS)))


async def first(run: Run, kafka: EmbeddedKafka) -> None:
    """Everything up to the kill; the broker is down when the last calls are made."""
    async with run.capture() as (capture, http):
        for member in range(MEMBERS):
            opening = {"session_id": name(SPOOLED, member), **spec(SPOOLED)}
            (await http.post("/v1/sessions", json=opening)).raise_for_status()
        async with run.stages():
            await each_calls(http, 0)
            await run.produce([event for group in (*CUT, WAITING, UNGRADED) for event in whole(group)])
            await run.produce(whole(SHORT, range(1, MEMBERS)))
            await run.produce([event for member in range(MEMBERS) for event in beginning(OPEN, member, 2)])
            await read(run.settings, CUTS, 1)
            await read(run.settings, BUILT, 6 * MEMBERS - 1)
            await read(run.settings, TRAJECTORIES, 5 * MEMBERS - 1)
        held = await read_balance(run.settings)
        assert held.balanced, held.as_json()
        assert held.total.pending == held.total.captured > 0
        await kafka.kill()
        await each_calls(http, 1)
        await capture.kill()
    await kafka.start()


async def second(run: Run) -> None:
    """The rest of every session; the spool is sent by the capture that starts on it."""
    async with run.stages(), run.capture() as (capture, http):
        await each_calls(http, 2)
        for member in range(MEMBERS):
            closing = {"reward": float(member % 2)}
            (await http.post(f"/v1/sessions/{name(SPOOLED, member)}/close", json=closing)).raise_for_status()
        await run.produce([event for member in range(MEMBERS) for event in ending(OPEN, member, 2)])
        await run.produce([*whole(SHORT, [0]), *whole(NEW)])
        await produce(run.settings, EVALUATIONS, [evaluation(member) for member in range(MEMBERS)])
        trained = await asyncio.to_thread(train, run.settings)
        assert trained == CAPTURED
        assert await capture.stop() == 0


def evaluation(member: int) -> tuple[str, bytes]:
    session = name(UNGRADED, member)
    made = Evaluation(
        evaluation_id=f"e-{session}", session_id=session, evaluator="external", outcome_reward=float(member % 2), at=1.0
    )
    return session, encode(made, JSON)


def train(settings: KafkaSettings) -> int:
    """Acknowledge every step; returns the number of tokens in them."""
    tokens = 0
    with BatchStream(settings=settings, timeout=WAIT) as stream:
        for number, step in enumerate(stream.steps(lambda: (0, 0)), 1):
            tokens += sum(int(batch.loss_mask.sum()) for batch in step)
            step.ack()
            if number == STEPS:
                break
    return tokens


@pytest.mark.parametrize("order", ["upgrade", "way back"])
async def test_one_release_finishes_what_the_other_began(order: str, earlier: Environment, tmp_path: Path) -> None:
    environments: tuple[Environment, ...] = (earlier, {}) if order == "upgrade" else ({}, earlier)
    with stub_http_server(lambda asked: engine_reply(int(json.loads(asked.body)["messages"][-1]["content"]))) as engine:
        async with EmbeddedKafka(tmp_path / "kafka", BrokerConfig(test_mode=True)) as kafka:
            settings = KafkaSettings(
                bootstrap_servers=kafka.bootstrap_servers, prefix="upgrade.", partitions=4, batch_partitions=1
            )
            await apply_topics(settings)
            before, after = (Run(settings, each, tmp_path / "spool", engine.url) for each in environments)
            await first(before, kafka)
            await second(after)
            settled = await settled_balance(settings)
            assert settled.balanced, settled.as_json()
            assert (settled.total.trained, settled.total.pending) == (CAPTURED, 0), settled.as_json()
            assert await read(settings, DEAD_LETTERS, 0) == []


async def test_both_releases_serve_one_run_side_by_side(earlier: Environment, tmp_path: Path) -> None:
    """As while an upgrade rolls: half of the tasks of builder and merger, and one of two evaluators, are newer."""
    async with EmbeddedKafka(tmp_path / "kafka", BrokerConfig(test_mode=True)) as kafka:
        settings = KafkaSettings(
            bootstrap_servers=kafka.bootstrap_servers, prefix="rolling.", partitions=4, batch_partitions=1
        )
        await apply_topics(settings)
        old, new = (Run(settings, each, tmp_path / "spool", "http://127.0.0.1:9") for each in (earlier, {}))
        newer = [service for service in STAGES if service != "batcher"]
        async with old.stages(half=0), new.stages(newer, half=1):
            for group in REPORTED:
                await new.produce(event for event in whole(group) if event["type"] != "session_closed")
                await new.produce(event for event in whole(group) if event["type"] == "session_closed")
            assert await asyncio.to_thread(train, settings) == CAPTURED
        built = await read(settings, BUILT, len(REPORTED) * MEMBERS)
        assert {record.partition % 2 for record in built} == {0, 1}
        settled = await settled_balance(settings)
        assert settled.balanced, settled.as_json()
        assert (settled.total.trained, settled.total.pending) == (CAPTURED, 0), settled.as_json()
        assert await read(settings, DEAD_LETTERS, 0) == []
