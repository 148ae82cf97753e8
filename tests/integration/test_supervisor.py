from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmill.errors import FatalError
from rollmill.runtime.supervisor import Program, RestartPolicy, Supervisor

QUICK = RestartPolicy(fenced_pause=0.1, first_pause=0.05)

SERVICE = """
    import http.server, os, signal, sys

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    def leave(number, frame):
        print("drained", flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    print("up", flush=True)
    http.server.HTTPServer(("127.0.0.1", int(os.environ["ROLLMILL_HEALTH_PORT"])), Answer).serve_forever()
"""


class World:
    """A supervisor over programs that the test writes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lines: list[str] = []
        self._news = asyncio.Event()
        self.supervisor = Supervisor(
            directory / "logs",
            environment={**os.environ, "PYTHONPATH": str(directory)},
            report=self._hear,
            policy=QUICK,
        )

    def program(self, name: str, source: str = SERVICE) -> Program:
        (self.directory / f"{name}_program.py").write_text(textwrap.dedent(source))
        return Program(name, f"{name}_program")

    async def until(self, line: str, times: int = 1) -> None:
        """Wait for a line of the supervisor's report."""
        async with asyncio.timeout(20):
            while sum(line in said for said in self.lines) < times:
                self._news.clear()
                await self._news.wait()

    def _hear(self, line: str) -> None:
        self.lines.append(line)
        self._news.set()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    async with world.supervisor:
        yield world


async def test_a_program_is_started_gets_ready_and_drains(world: World) -> None:
    await world.supervisor.start(world.program("one"))
    await world.supervisor.wait_ready("one")
    assert await world.supervisor.stop("one") == 0
    assert world.supervisor.log_file("one").read_text().split() == ["up", "drained"]


async def test_a_killed_program_comes_back_on_the_same_port(world: World) -> None:
    await world.supervisor.start(world.program("one"))
    await world.supervisor.wait_ready()
    before, url = world.supervisor.pid("one"), world.supervisor.health_url("one")
    world.supervisor.kill("one")
    await world.until("one: started", times=2)
    await world.supervisor.wait_ready("one")
    assert world.supervisor.pid("one") not in (None, before)
    assert world.supervisor.health_url("one") == url
    assert world.supervisor.starts("one") == 2


async def test_a_fenced_program_is_restarted_after_the_longer_pause(world: World) -> None:
    await world.supervisor.start(world.program("one", "raise SystemExit(75)"))
    await world.until("one: restart in 0.1 s", times=2)


async def test_exit_code_70_is_reported_with_the_tail_of_the_log(world: World) -> None:
    await world.supervisor.start(world.program("one", "print('no such topic'); raise SystemExit(70)"))
    message = await asyncio.wait_for(world.supervisor.fatal_exit(), 20)
    assert "one stopped for good" in message
    assert "no such topic" in message
    assert world.supervisor.starts("one") == 1


async def test_f3_a_program_that_ends_without_a_stop_request_is_restarted(world: World) -> None:
    await world.supervisor.start(world.program("one", "raise SystemExit(0)"))
    await world.until("one: exit code 0 without a stop request", times=2)
    await world.until("one: restart in", times=2)


async def test_a_program_that_stopped_on_request_stays_down(world: World) -> None:
    await world.supervisor.start(world.program("one"))
    await world.supervisor.wait_ready("one")
    await world.supervisor.stop("one")
    with pytest.raises(FatalError, match="before it was ready"):
        await world.supervisor.wait_ready("one")
    assert world.supervisor.starts("one") == 1


async def test_close_drains_in_the_order_of_the_starts(world: World) -> None:
    for name in ("first", "second"):
        await world.supervisor.start(world.program(name))
    await world.supervisor.wait_ready()
    await world.supervisor.close()
    drains = [line for line in world.lines if "draining" in line or "exit code" in line]
    assert drains == ["first: draining", "first: exit code 0", "second: draining", "second: exit code 0"]


async def test_a_program_that_does_not_drain_is_killed(world: World) -> None:
    await world.supervisor.start(world.program("one", SERVICE.replace("os._exit(0)", "pass")))
    await world.supervisor.wait_ready("one")
    assert await world.supervisor.stop("one", patience=0.2) == -signal.SIGKILL


def test_programs_die_with_their_supervisor(tmp_path: Path) -> None:
    World(tmp_path).program("one")
    parent = tmp_path / "parent.py"
    parent.write_text(
        textwrap.dedent(
            """
            import asyncio, os, pathlib, sys
            from rollmill.runtime.supervisor import Program, Supervisor

            async def main():
                logs = pathlib.Path(sys.argv[1])
                async with Supervisor(logs, environment=os.environ, report=lambda line: None) as supervisor:
                    await supervisor.start(Program("one", "one_program"))
                    await supervisor.wait_ready("one")
                    print(supervisor.pid("one"), flush=True)
                    await asyncio.Event().wait()

            asyncio.run(main())
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(parent), str(tmp_path / "logs")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        descriptor = os.pidfd_open(child)
        process.kill()
        process.wait()
    assert _ends(descriptor)


def _ends(descriptor: int) -> bool:
    """Whether the process behind a pidfd ends within seconds (it is no child of ours, so it cannot be waited for)."""
    readable, _, _ = select.select([descriptor], [], [], 10)
    os.close(descriptor)
    return bool(readable)
