"""The parts of a sandbox that need none: caps, reports, limits, control groups, what a container is told."""

import platform
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.errors import InfrastructureError
from rollmill.strategies.sandbox import (
    Ending,
    Job,
    JobLimits,
    JobOutcome,
    NoSandbox,
    Output,
    Sandbox,
    SandboxUnavailableError,
    Step,
)
from rollmill_evaluator.sandbox import seccomp
from rollmill_evaluator.sandbox.cgroups import ControlGroups
from rollmill_evaluator.sandbox.docker import Docker
from rollmill_evaluator.sandbox.job_result import outcome_of, read_reports
from rollmill_evaluator.sandbox.process import CappedOutput, Command, ProcessResult
from rollmill_evaluator.sandbox.selection import LazySandbox, SandboxOptions, local_sandbox

JOB = Job((Step("first", ("true",)), Step("last", ("true",))), collect=("/sandbox/a",))


@given(chunks=st.lists(st.binary(max_size=40), max_size=20), limit=st.integers(1, 60))
def test_a_capped_output_keeps_both_ends_and_counts_the_rest(chunks: list[bytes], limit: int) -> None:
    output, whole = CappedOutput(limit), b"".join(chunks)
    for chunk in chunks:
        output.add(chunk)
    kept = output.kept()
    assert len(kept.head) + kept.dropped + len(kept.tail) == len(whole)
    assert whole.startswith(kept.head)
    assert whole.endswith(kept.tail)
    assert len(kept.head) + len(kept.tail) == min(limit, len(whole))


def test_f5_output_byte_by_byte_takes_no_more_memory_than_its_limit() -> None:
    tracemalloc.start()
    output = CappedOutput(2**18)
    for _ in range(2**19):
        output.add(b"x")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(output.kept().tail) == 2**17
    assert most < 2 * 2**20


def test_what_was_dropped_shows_in_the_text() -> None:
    assert Output(b"a", b"z", 5).text == "a\n[5 bytes dropped]\nz"
    assert Output(b"a\xff", b"z").text == "a\ufffdz"


def ended(reports: bytes, ending: Ending = Ending.EXITED, code: int = 0) -> ProcessResult:
    return ProcessResult(ending, 1.0, Output(b"said"), reports, code)


def test_reports_are_steps_and_files() -> None:
    said = b"noise\nw ready\nw step 0 0 3\noutw last 0\nw step 1 5 0\nw file 0 4\nw enw end 0\n"
    outcome = outcome_of(JOB, "w", ended(said))
    assert [(step.name, step.exit_code, step.output) for step in outcome.steps] == [
        ("first", 0, "out"),
        ("last", 5, ""),
    ]
    assert outcome.files == {"/sandbox/a": b"w en"}
    assert outcome.ending is Ending.EXITED


@pytest.mark.parametrize("said", [b"", b"bwrap: no permissions\n", b"x ready\nx end 0\n"])
def test_a_script_that_never_began_is_infrastructure(said: bytes) -> None:
    with pytest.raises(InfrastructureError, match="sandbox_failed"):
        outcome_of(JOB, "w", ended(said))


@pytest.mark.parametrize("code", [-9, -15, 125])
def test_a_sandbox_that_was_ended_from_outside_is_infrastructure(code: int) -> None:
    with pytest.raises(InfrastructureError, match="ended from outside"):
        outcome_of(JOB, "w", ended(b"w ready\nw step 0 0 0\n", code=code))
    timed_out = ended(b"w ready\nw step 0 0 0\n", Ending.TIMED_OUT, code)
    assert outcome_of(JOB, "w", timed_out).ending is Ending.TIMED_OUT


def test_a_script_that_never_ended_died() -> None:
    outcome = outcome_of(JOB, "w", ended(b"w ready\nw step 0 0 0\n"))
    assert (outcome.ending, len(outcome.steps)) == (Ending.DIED, 1)
    assert outcome_of(JOB, "w", ended(b"w ready\n"), exhausted=True).ending is Ending.EXHAUSTED
    assert outcome_of(JOB, "w", ended(b"w ready\n", Ending.TIMED_OUT)).ending is Ending.TIMED_OUT


@given(st.binary(max_size=300))
def test_any_bytes_are_reports_or_none(noise: bytes) -> None:
    reports = read_reports(JOB, "w", b"w ready\n" + noise + b"\nw step 7 0 0\nw file 9 1\nw step 0 x 0\nw file 0 99\n")
    assert len(reports.steps) <= len(JOB.steps)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_refused_call_has_a_number_on_every_architecture(machine: str) -> None:
    program = seccomp.program(machine)
    assert len(program) % 8 == 0
    assert len(program) // 8 < 4096
    numbers = [seccomp.ARCHITECTURES[machine].numbers[name] for name in seccomp.REFUSED]
    assert len(set(numbers)) == len(numbers)


def controlled(folder: Path, controllers: str = "cpu memory pids") -> ControlGroups:
    (folder / "cgroup.subtree_control").write_text(controllers)
    return ControlGroups(folder)


def test_a_control_group_limits_one_job_and_is_entered_first(tmp_path: Path) -> None:
    """The files that the kernel would read; that it obeys them is not tested here."""
    groups = controlled(tmp_path)
    assert groups.unavailable() is None
    with groups.group(JobLimits(memory_bytes=2**20, processes=3)) as group:
        written = {file.name: file.read_text() for file in group.path.iterdir()}
        assert written == {"memory.max": str(2**20), "memory.oom.group": "1", "memory.swap.max": "0", "pids.max": "11"}
        gated = group.enter_first(Command(("bwrap", "--help"), {}, uid=65534))
        assert gated.argv[:3] == ("/bin/sh", "-c", 'echo 0 > "$1/cgroup.procs" && shift && exec "$@"')
        assert gated.argv[4] == str(group.path)
        assert gated.argv[5:] == (
            *("/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"),
            *("bwrap", "--help"),
        )
        assert gated.uid is None
        assert not group.exhausted()
        (group.path / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
        assert group.exhausted()
    assert (group.path / "cgroup.kill").read_text() == "1"


@pytest.mark.parametrize(("controllers", "said"), [("cpu memory", "lacks pids"), ("", "lacks memory, pids")])
async def test_a_control_group_that_cannot_limit_is_refused(tmp_path: Path, controllers: str, said: str) -> None:
    options = SandboxOptions(bwrap=Path("/bin/true"), cgroup=controlled(tmp_path, controllers).parent)
    with pytest.raises(SandboxUnavailableError, match=said):
        await local_sandbox(options).run(JOB)


def test_a_container_is_told_its_limits() -> None:
    limits = JobLimits(memory_bytes=2**28, processes=10, disk_bytes=2**20)
    job = Job(JOB.steps, mounts={"/source": Path("/data")}, environment={"A": "b"}, image="i", limits=limits)
    said = " ".join(Docker()._options(job, "name"))
    for words in (
        "--pull never",
        "--network none",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        f"--memory {2**28} --memory-swap {2**28}",
        "--pids-limit 18",
        f"--tmpfs /sandbox:rw,exec,mode=1777,size={2**20}",
        "--mount type=bind,source=/data,target=/source,readonly",
        "--env A=b",
    ):
        assert words in said


@pytest.mark.parametrize("limits", [{"seconds": 0.0}, {"processes": 0}, {"address_space_bytes": 0}])
def test_limits_are_above_zero(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        JobLimits(**limits)


async def test_a_machine_without_bubblewrap_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox = local_sandbox(SandboxOptions())
    assert isinstance(await sandbox.found(), NoSandbox)
    with pytest.raises(SandboxUnavailableError, match="apt-get install bubblewrap"):
        await sandbox.run(JOB)


async def test_a_machine_whose_system_calls_are_not_known_has_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxUnavailableError, match="no seccomp filter is known for riscv64"):
        await local_sandbox(SandboxOptions(bwrap=Path("/bin/true"))).run(JOB)


async def test_a_sandbox_that_was_not_there_is_looked_for_again_and_then_kept() -> None:
    looked: list[int] = []

    async def find() -> Sandbox:
        looked.append(1)
        return NoSandbox("not yet") if len(looked) == 1 else Found()

    chosen = LazySandbox("late", find, jobs=1, retry_seconds=0.0)
    with pytest.raises(SandboxUnavailableError, match="not yet"):
        await chosen.run(JOB)
    for _ in range(2):
        assert (await chosen.run(JOB)).ending is Ending.EXITED
    assert len(looked) == 2
    patient = LazySandbox("never", local_sandbox(SandboxOptions(bwrap=Path("/bin/true"))).find, jobs=1)
    assert await patient.found() is await patient.found()


class Found:
    async def run(self, job: Job) -> JobOutcome:  # noqa: ARG002  # the protocol's signature
        return JobOutcome(Ending.EXITED, 0.0)


async def test_a_program_that_is_no_bubblewrap_is_none() -> None:
    with pytest.raises(SandboxUnavailableError, match="/bin/true does not work here"):
        await local_sandbox(SandboxOptions(bwrap=Path("/bin/true"))).run(JOB)
