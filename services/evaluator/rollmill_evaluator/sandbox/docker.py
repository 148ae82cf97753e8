"""The sandbox in containers, by the command line of a Docker engine. The image must exist there: none is pulled."""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollmill.errors import InfrastructureError, InvalidInputError
from rollmill.strategies.sandbox import SANDBOX_FAILED, WORK, Job, JobLimits, JobOutcome
from rollmill_evaluator.sandbox.job_result import outcome_of
from rollmill_evaluator.sandbox.process import Command, run
from rollmill_evaluator.sandbox.script import SCRIPT, job_script, process_limits

ENGINE_SECONDS = 60
"""For one command of the engine: create, copy, inspect, remove."""
OWN_PROCESSES = 8
LABEL = "rollmill.job"
"""On every container. One that a killed service left ends at its deadline; `docker container prune` removes it."""


@dataclass(frozen=True)
class Docker:
    """A `Sandbox` that makes one container per job, and removes it."""

    program: str = "docker"
    user: str | None = None
    """Inside the container; None: the image's own. Without capabilities even root has no privileges."""

    async def run(self, job: Job) -> JobOutcome:
        if job.image is None:
            raise InvalidInputError("a job in a container needs an image")
        nonce, name = secrets.token_hex(16), f"rollmill-job-{secrets.token_hex(8)}"
        try:
            await self._engine("create", *self._options(job, name), job.image, *_script_command(job.limits))
            await self._engine(
                "cp", "-", f"{name}:/", stdin=_archive({**job.files, SCRIPT: job_script(job, nonce).encode()})
            )
            command = Command((*self._argv, "start", "--attach", name), _engine_environment())
            limits = process_limits(job, nonce)
            result = await run(command, limits, lambda _: False)
            exhausted = (await self._engine("inspect", "--format", "{{.State.OOMKilled}}", name)).strip() == "true"
        finally:
            await asyncio.shield(self._remove(name))
        return outcome_of(job, nonce, result, exhausted=exhausted)

    @property
    def _argv(self) -> tuple[str, ...]:
        return (shutil.which(self.program) or self.program,)

    def _options(self, job: Job, name: str) -> Iterator[str]:
        yield from ("--name", name, "--label", LABEL, "--pull", "never", *ISOLATION, *_limited(job.limits))
        if self.user is not None:
            yield from ("--user", self.user)
        for key, value in {"HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", **job.environment}.items():  # noqa: S108  # the container's own /tmp
            yield from ("--env", f"{key}={value}")
        for path, source in job.mounts.items():
            yield from ("--mount", f"type=bind,source={source},target={path},readonly")

    async def _engine(self, *arguments: str, stdin: bytes | None = None) -> str:
        """Run one command of the engine; its output. Raises InfrastructureError where it fails or takes too long."""
        process = await asyncio.create_subprocess_exec(
            *self._argv,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_engine_environment(),
        )
        try:
            async with asyncio.timeout(ENGINE_SECONDS):
                output, errors = await process.communicate(stdin)
        except TimeoutError as error:
            raise InfrastructureError(SANDBOX_FAILED, f"{self.program} {arguments[0]} does not answer") from error
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            detail = errors.decode(errors="replace").strip()[-1000:]
            raise InfrastructureError(SANDBOX_FAILED, f"{self.program} {arguments[0]}: {detail}")
        return output.decode(errors="replace")

    async def _remove(self, name: str) -> None:
        try:
            await self._engine("rm", "--force", "--volumes", name)
        except InfrastructureError:  # it was never made, or the engine does not answer: its own deadline ends it
            return

    async def unavailable(self) -> str | None:
        """Why there is no engine; None: there is one."""
        if shutil.which(self.program) is None:
            return f"no {self.program} on PATH"
        try:
            await self._engine("version", "--format", "{{.Server.Version}}")
        except InfrastructureError as error:
            return str(error)
        return None


ISOLATION = (
    "--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--ipc", "private",
    "--init", "--hostname", "sandbox", "--workdir", WORK,
)  # fmt: skip


def _limited(limits: JobLimits) -> Iterator[str]:
    """Limits of the engine. An image's own folders stay writable, as tests want; the work folder and /tmp are sized."""
    seconds = int(limits.prepare_seconds + limits.seconds) + 1
    for path in (WORK, "/tmp"):  # noqa: S108  # the container's own /tmp
        yield from ("--tmpfs", f"{path}:rw,exec,mode=1777,size={min(limits.disk_bytes, limits.memory_bytes)}")
    yield from ("--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes))
    yield from ("--pids-limit", str(limits.processes + OWN_PROCESSES), "--stop-timeout", "1")
    for name, value in (("fsize", limits.disk_bytes), ("nofile", limits.open_files), ("cpu", seconds), ("core", 0)):
        yield from ("--ulimit", f"{name}={value}:{value}")


def _script_command(limits: JobLimits) -> tuple[str, ...]:
    """The script under a deadline of its own, which holds without the service: a killed service kills no container."""
    seconds = int(limits.prepare_seconds + limits.seconds) + ENGINE_SECONDS
    return ("timeout", "-s", "KILL", str(seconds), "/bin/sh", SCRIPT)


def _archive(files: Mapping[str, bytes]) -> bytes:
    """Files as a tar archive, to be copied into the container before it starts."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(content), 0o444
            archive.addfile(entry, io.BytesIO(content))
    return data.getvalue()


def _engine_environment() -> dict[str, str]:
    """The Docker client finds the engine by these variables; none of them reaches the container."""
    return {key: value for key, value in os.environ.items() if key.startswith("DOCKER_") or key in {"HOME", "PATH"}}
