"""What every sandbox promises, on each backend that this machine has."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import InvalidInputError
from rollmill.strategies.sandbox import WORK, Ending, Job, JobLimits, JobOutcome, NoSandbox, Sandbox, Step
from rollmill.testing.processes import processes_with, until_gone
from rollmill.testing.requirements import fail_in_ci_or_skip
from rollmill_evaluator.sandbox.selection import SandboxOptions, container_sandbox, local_sandbox

IMAGE = "debian:bookworm-slim"
LIMITS = JobLimits(seconds=30.0, prepare_seconds=30.0, memory_bytes=256 * 2**20, disk_bytes=16 * 2**20, processes=64)

Run = Callable[..., Any]


@pytest.fixture(params=["bubblewrap", "docker"])
async def run(request: pytest.FixtureRequest, sandbox_options: SandboxOptions) -> AsyncIterator[Run]:
    docker = request.param == "docker"
    chosen = container_sandbox(sandbox_options) if docker else local_sandbox(sandbox_options)
    sandbox = await chosen.found()
    if isinstance(sandbox, NoSandbox):
        pytest.skip(sandbox.why) if docker else fail_in_ci_or_skip(sandbox.why)
    if docker:
        await _pulled()

    async def one(*steps: str, limits: JobLimits = LIMITS, **changes: Any) -> JobOutcome:
        made = tuple(Step.shell(f"s{number}", step) for number, step in enumerate(steps))
        return await sandbox.run(Job(made, limits=limits, image=IMAGE if docker else None, **changes))

    yield one
    outcome = await one("echo still serving")
    assert outcome.output.text == "still serving\n"


async def _pulled() -> None:
    process = await asyncio.create_subprocess_exec(shutil.which("docker") or "docker", "pull", "--quiet", IMAGE)
    if await process.wait():
        pytest.skip(f"the engine cannot get {IMAGE}")


async def test_steps_run_in_order_and_the_last_ones_output_counts(run: Run) -> None:
    outcome = await run("echo quiet; echo one > a", "cat a >&2; echo two; pwd; exit 3")
    assert outcome.ending is Ending.EXITED
    assert [(step.name, step.exit_code, step.output) for step in outcome.steps] == [("s0", 0, "quiet\n"), ("s1", 3, "")]
    assert outcome.output.text == f"one\ntwo\n{WORK}\n"


async def test_a_failing_step_is_the_last_one_and_says_why(run: Run) -> None:
    outcome = await run("echo nothing fits; exit 7", "echo never")
    assert outcome.ending is Ending.EXITED
    assert [(step.exit_code, step.output) for step in outcome.steps] == [(7, "nothing fits\n")]
    assert outcome.output.text == ""


async def test_files_and_mounts_come_in_read_only_and_results_come_out(run: Run, public_path: Path) -> None:
    (public_path / "given").write_text("from outside")
    outcome = await run(
        "head -c 100 /dev/zero > big; mkfifo pipe; ln -s /given link",
        "cat /in/a /given; echo x > /given; echo y > /in/a",
        files={"/in/a": b"a file, "},
        mounts={"/given": public_path / "given"},
        collect=(f"{WORK}/big", f"{WORK}/absent", f"{WORK}/pipe", f"{WORK}/link"),
        limits=JobLimits(seconds=30, collect_bytes=40),
    )
    assert outcome.output.text.startswith("a file, from outside")
    assert (public_path / "given").read_text() == "from outside"
    assert outcome.files == {f"{WORK}/big": bytes(40), f"{WORK}/link": b"from outside"}


async def test_nothing_of_the_services_environment_is_inside(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_API_KEY", "hush")
    outcome = await run("env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline", environment={"GIVEN": "yes"})
    assert "hush" not in outcome.output.text
    assert "GIVEN=yes" in outcome.output.text


async def test_there_is_no_network_but_loopback(run: Run) -> None:
    outcome = await run("cat /proc/net/dev | tail -n +3 | cut -d: -f1")
    assert [line.strip() for line in outcome.output.text.splitlines()] == ["lo"]


async def test_output_is_kept_at_both_ends_and_counted_between(run: Run) -> None:
    outcome = await run(
        "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last",
        limits=JobLimits(seconds=30, output_bytes=1000),
    )
    assert outcome.output.head.startswith(b"first\nxx")
    assert outcome.output.tail.endswith(b"xx\nlast\n")
    assert len(outcome.output.head) + len(outcome.output.tail) == 1000
    assert outcome.output.dropped == len("first\n") + 3_000_000 + len("\nlast\n") - 1000


async def test_the_deadline_is_that_of_the_last_step(run: Run) -> None:
    marker = f"{time.time_ns() % 10**9}9"
    outcome = await run("sleep 1", f"echo begun; sleep {marker}", limits=JobLimits(seconds=0.5, prepare_seconds=30))
    assert outcome.ending is Ending.TIMED_OUT
    assert [step.name for step in outcome.steps] == ["s0"]
    assert outcome.output.text == "begun\n"
    assert outcome.seconds < 30
    await until_gone(marker)


async def test_preparing_has_a_deadline_of_its_own(run: Run) -> None:
    outcome = await run("sleep 99", "echo never", limits=JobLimits(seconds=30, prepare_seconds=2))
    assert (outcome.ending, outcome.steps) == (Ending.TIMED_OUT, ())


async def test_cancelling_ends_everything_inside(run: Run) -> None:
    marker = f"{time.time_ns() % 10**9}8"
    task = asyncio.create_task(run(f"sleep {marker} & sleep {marker}"))
    async with asyncio.timeout(10):
        while not await processes_with(marker):
            continue
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_gone(marker)


async def test_daemons_do_not_outlive_the_job(run: Run) -> None:
    marker = f"{time.time_ns() % 10**9}7"
    daemon = f"setsid sh -c 'setsid sleep {marker} & exit' </dev/null >/dev/null 2>&1 &"
    outcome = await run(f"{daemon} nohup sleep {marker} >/dev/null 2>&1 & sleep 0.2; echo left them")
    assert outcome.output.text == "left them\n"
    await until_gone(marker)


async def test_jobs_run_beside_each_other_and_never_hold_up_the_loop(run: Run) -> None:
    began = time.monotonic()
    outcomes = asyncio.gather(*(run(f"sleep 2; echo {number}") for number in range(6)))
    beats = 0
    while not outcomes.done():
        await asyncio.sleep(0.01)
        beats += 1
    assert [outcome.output.text for outcome in await outcomes] == [f"{number}\n" for number in range(6)]
    assert time.monotonic() - began < 10
    assert beats > 20


async def test_tools_are_where_they_are_outside_and_read_only(
    sandbox_options: SandboxOptions, public_path: Path, sandbox: Sandbox
) -> None:
    (public_path / "tool").write_text("echo made")
    (public_path / "tool").chmod(0o755)
    mine = await local_sandbox(replace(sandbox_options, tools=(public_path, Path("/usr/lib")))).found()
    tool = public_path / "tool"
    outcome = await mine.run(Job((Step.shell("a", f"sh {tool}; echo x > {tool}; ls {public_path.parent}"),)))
    assert outcome.output.text.startswith("made\n")
    assert tool.read_text() == "echo made"
    assert type(mine) is type(sandbox)


async def test_a_job_that_cannot_be_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="at least one step"):
        Job(())
    for path in ("relative", "/a/../b", "/nul\0"):
        with pytest.raises(ValueError, match="no absolute path"):
            Job((Step.shell("a", "true"),), files={path: b""})
    with pytest.raises(ValueError, match="above 0"):
        JobLimits(processes=0)
    with pytest.raises(InvalidInputError, match="has no images"):
        await sandbox.run(Job((Step.shell("a", "true"),), image=IMAGE))
