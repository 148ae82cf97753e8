"""The processes of one run: broker, a proxy for each client, engine, services, trainer. All end with the block."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from chaos.load.scripted_conversation import respond
from chaos.mutations import MUTATION, Mutation
from chaos.network_proxy import NetworkProxy
from chaos.supervisor_log import SupervisorLog
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import BrokerConfig, EmbeddedKafka, Listener
from rollmill.runtime.supervisor import Program, RestartPolicy, Supervisor, free_port, kafka_environment
from rollmill.settings import KafkaSettings
from rollmill.testing.http.canned_server import canned_server

BUILDERS = ("builder-0", "builder-1")
STAGES = (*BUILDERS, "reward-merger", "batcher")
"""They own tasks by transactional ids: a second process of one takes its tasks over."""
SERVICES = ("capture", *BUILDERS, "evaluator", "reward-merger", "batcher")
TRAINER = "trainer"
CLIENTS = (*SERVICES, TRAINER)
MODULES = {
    "capture": "rollmill_capture",
    "builder-0": "rollmill_builder",
    "builder-1": "rollmill_builder",
    "evaluator": "rollmill_evaluator",
    "reward-merger": "rollmill_reward_merger",
    "batcher": "rollmill_batcher",
    TRAINER: "chaos.trainer",
}
ROOT = Path(__file__).parents[1]
TRANSACTION_MS = 10_000
POLICY = RestartPolicy(fenced_pause=4.0, first_pause=0.1, longest_pause=2.0)
"""As in production, with shorter pauses."""
GROUPS_PER_STEP = 2
PARTITIONS = 4
START_SECONDS = 180.0
"""Generous: a busy machine must not fail a run."""


@dataclass(frozen=True)
class ClientListeners:
    """The listener at the broker of each client, and the proxy in front of it."""

    listeners: dict[str, Listener]

    @classmethod
    def free(cls) -> ClientListeners:
        ports = {free_port() for _ in range(4 * len(CLIENTS))}
        return cls(
            {
                client: Listener(name=client.upper().replace("-", "_"), port=ports.pop(), advertised_port=ports.pop())
                for client in CLIENTS
            }
        )

    def config(self) -> BrokerConfig:
        return BrokerConfig(test_mode=True, start_seconds=START_SECONDS, more_listeners=tuple(self.listeners.values()))

    def proxies(self) -> dict[str, NetworkProxy]:
        return {
            client: NetworkProxy(listener.advertised_port, listener.port) for client, listener in self.listeners.items()
        }


@dataclass
class Stack:
    """The processes of one run, and what controls them."""

    directory: Path
    broker: EmbeddedKafka
    proxies: dict[str, NetworkProxy]
    settings: KafkaSettings
    supervisor: Supervisor
    supervisor_log: SupervisorLog
    capture_url: str
    environment: dict[str, str]
    programs: dict[str, Program] = field(default_factory=dict)

    @property
    def trainer_directory(self) -> Path:
        return self.directory / TRAINER

    async def twin(self, name: str) -> Process:
        """Start a second process of a service, outside of the supervisor; it ends with this one."""
        program = self.programs[name]
        environment = {**self.environment, **program.env, "ROLLMILL_HEALTH_PORT": "0"}
        launch = (sys.executable, "-m", "rollmill.runtime.supervisor.launch", str(os.getpid()))
        with (self.directory / f"{name}-twin.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(*launch, program.module, *program.arguments),
                env=environment,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@asynccontextmanager
async def running_stack(
    directory: Path, broker: EmbeddedKafka, listeners: ClientListeners, prefix: str, mutation: Mutation | None
) -> AsyncIterator[Stack]:
    """Start everything; on entry all services are ready and the trainer runs."""
    (directory / TRAINER).mkdir(parents=True)
    settings = KafkaSettings(
        bootstrap_servers=broker.bootstrap_servers,
        prefix=prefix,
        partitions=PARTITIONS,
        batch_partitions=1,
        transaction_timeout_ms=TRANSACTION_MS,
        session_timeout_ms=6_000,
        request_timeout_ms=12_000,
    )
    supervisor_log = SupervisorLog(directory / "supervisor.log")
    async with AsyncExitStack() as resources:
        engine = await resources.enter_async_context(canned_server(respond))
        proxies = listeners.proxies()
        for proxy in proxies.values():
            await resources.enter_async_context(proxy)
        await apply_topics(settings)
        environment = _environment(mutation)
        supervisor = await resources.enter_async_context(
            Supervisor(directory, environment=environment, report=supervisor_log.write, policy=POLICY)
        )
        port = free_port()
        stack = Stack(
            directory,
            broker,
            proxies,
            settings,
            supervisor,
            supervisor_log,
            f"http://127.0.0.1:{port}",
            environment,
        )
        stack.programs = {name: _program(stack, name, port, engine.url) for name in CLIENTS}
        for program in stack.programs.values():
            await supervisor.start(program)
        await supervisor.wait_ready(*SERVICES, timeout=START_SECONDS)
        yield stack


def _environment(mutation: Mutation | None) -> dict[str, str]:
    mutated = {} if mutation is None else {MUTATION: mutation.value}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"PATH": os.environ["PATH"], "PYTHONPATH": paths, **mutated}


def _program(stack: Stack, name: str, port: int, engine: str) -> Program:
    module = MODULES[name]
    own = (str(stack.trainer_directory),) if name == TRAINER else ()
    environment = {
        **kafka_environment(stack.settings),
        "ROLLMILL_BOOTSTRAP_SERVERS": f"127.0.0.1:{stack.proxies[name].port}",
        **_service_settings(stack, name, port, engine),
    }
    return Program(name, "chaos.child", environment, (str(stack.directory), name, module, *own))


def _service_settings(stack: Stack, name: str, port: int, engine: str) -> dict[str, str]:
    common = {"ROLLMILL_DEADLINE_SECONDS": "6", "ROLLMILL_LINGER_MS": "30"}
    if name in BUILDERS:
        return {**common, "ROLLMILL_PROCESSES": "2", "ROLLMILL_PROCESS_INDEX": name[-1]}
    if name == "capture":
        return {
            "ROLLMILL_DEADLINE_SECONDS": "6",
            "ROLLMILL_PORT": str(port),
            "ROLLMILL_UPSTREAM": engine,
            "ROLLMILL_SPOOL_DIR": str(stack.directory / "spool"),
            "ROLLMILL_SPOOL_AFTER_SECONDS": "2",
            "ROLLMILL_DEFAULT_ROUTE": json.dumps({"version_source": "announced"}),
        }
    if name == "batcher":
        return {**common, "ROLLMILL_GROUPS_PER_STEP": str(GROUPS_PER_STEP), "ROLLMILL_MAX_STALENESS": "none"}
    return common


async def exit_code_within(process: Process, seconds: float) -> int | None:
    """The exit code; None where it has not ended in time."""
    with suppress(TimeoutError):
        return await asyncio.wait_for(process.wait(), seconds)
    return None
