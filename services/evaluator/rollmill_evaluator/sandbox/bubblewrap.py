"""The sandbox on this machine: bubblewrap, which needs no daemon and no privileges, only user namespaces.

What a job sees: /usr (with /bin and /lib), some files of /etc and the configured tools, all read-only; its own /proc,
/dev, a work folder and /tmp; itself as the only processes; a network with nothing but its own loopback. It runs without
capabilities and cannot make namespaces; a seccomp filter refuses what namespaces do not confine. If the service
crashes, the kernel ends the sandbox with it.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rollmill.errors import InfrastructureError, InvalidInputError
from rollmill.strategies.sandbox import SANDBOX_FAILED, WORK, Ending, Job, JobLimits, JobOutcome, Step
from rollmill_evaluator.sandbox import seccomp
from rollmill_evaluator.sandbox.cgroups import ControlGroups
from rollmill_evaluator.sandbox.job_result import outcome_of
from rollmill_evaluator.sandbox.process import Command, run
from rollmill_evaluator.sandbox.script import SCRIPT, job_script, process_limits
from rollmill_evaluator.sandbox.usage import UsageCheck

INSIDE_UID = 1000
TESTBED = "/testbed"
"""Where the scripts of SWE-bench instances expect the work tree: a link to it."""
SHARED_MEMORY_BYTES = 64 * 2**20
OWN_PROCESSES = 6
"""bubblewrap's own processes and the job's shells, which count in addition to the job's processes."""
SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Links into /usr on merged systems, folders on others."""
ETC = (
    "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime",
    "/etc/mime.types", "/etc/nsswitch.conf", "/etc/protocols", "/etc/services", "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)  # fmt: skip
PASSWD = f"root:x:0:0::/:/bin/sh\nsandbox:x:{INSIDE_UID}:{INSIDE_UID}::/tmp:/bin/sh\n".encode()
GROUP = f"root:x:0:\nsandbox:x:{INSIDE_UID}:\n".encode()
HOSTS = b"127.0.0.1 localhost sandbox\n::1 localhost\n"
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Bubblewrap:
    """A `Sandbox` that starts one bubblewrap per job."""

    program: Path
    uid: int | None = None
    """User to become before bubblewrap starts (only root can); None: stay who the service is."""
    tools: tuple[Path, ...] = ()
    """Files and folders that jobs see read-only under the same path, such as a language's installation."""
    groups: ControlGroups | None = None

    async def run(self, job: Job) -> JobOutcome:
        if job.image is not None:
            raise InvalidInputError("this sandbox runs on the machine's own system and has no images")
        nonce = secrets.token_hex(16)
        with ExitStack() as stack:
            group = stack.enter_context(self.groups.group(job.limits)) if self.groups else None
            command = self._command(job, nonce, stack)
            command = group.enter_first(command) if group else command
            try:
                usage = UsageCheck(job.limits, 2 * OWN_PROCESSES, tmpfs_sizes(job.limits))
                result = await run(command, process_limits(job, nonce), usage)
            except OSError as error:
                raise InfrastructureError(SANDBOX_FAILED, f"{self.program} cannot be started: {error}") from error
            exhausted = group is not None and group.exhausted()
        return outcome_of(job, nonce, result, exhausted=exhausted)

    def _command(self, job: Job, nonce: str, stack: ExitStack) -> Command:
        files = {"/etc/passwd": PASSWD, "/etc/group": GROUP, "/etc/hosts": HOSTS, **job.files}
        files[SCRIPT] = job_script(job, nonce).encode()
        descriptors = {path: stack.enter_context(_MemoryFile(data)) for path, data in files.items()}
        filters = stack.enter_context(_MemoryFile(seccomp.program(platform.machine())))
        argv = [
            str(self.program),
            *ISOLATION,
            *_environment(job.environment),
            *_system(),
            *_devices(),
            *_writable(job.limits),
            *("--remount-ro", "/dev"),
            *_bound(tool for tool in self.tools if not tool.is_relative_to("/usr")),  # they may be below /tmp
            *("--symlink", WORK, TESTBED),
            *(option for path, source in job.mounts.items() for option in ("--ro-bind", str(source), path)),
            *_file_options(descriptors),
            *("--remount-ro", "/", "--chdir", WORK, "--seccomp", str(filters.number), "--"),
            *_limited(job.limits),
            *("/bin/sh", SCRIPT),
        ]
        numbers = tuple(memory.number for memory in (*descriptors.values(), filters))
        # bubblewrap gets an empty environment: it is the first process of the sandbox, so jobs can read it in /proc.
        return Command(argv, {}, numbers, self.uid)


ISOLATION = (
    "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session",
    "--cap-drop", "ALL", "--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--hostname", "sandbox", "--clearenv",
)  # fmt: skip


def _file_options(files: Mapping[str, _MemoryFile]) -> Iterator[str]:
    for path, file in files.items():
        yield from ("--ro-bind-data", str(file.number), path)


def _environment(added: Mapping[str, str]) -> Iterator[str]:
    values = {"PATH": PATH, "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", **added}  # noqa: S108  # the sandbox's own /tmp
    for name, value in values.items():
        yield from ("--setenv", name, value)


def _system() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for name in SYSTEM_LINKS:
        path = Path(name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), name)
        elif path.is_dir():
            yield from ("--ro-bind", name, name)
    for name in ETC:
        yield from ("--ro-bind-try", name, name)


def _bound(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        yield from ("--ro-bind", str(path), str(path))


def _devices() -> tuple[str, ...]:
    """A /dev and a /proc of its own, both remounted read-only (/dev once /dev/shm is in it).

    /dev would be a writable file system without a size limit. In /proc, settings of the whole kernel are files of root,
    and a process that is root on the machine could write them without any capability.
    """
    return ("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev")


def tmpfs_sizes(limits: JobLimits) -> dict[str, int]:
    """Every place where a job can write, with its size in bytes: all of them are memory, so none is larger than the
    job's memory, and what is stored in them counts as its memory.
    """
    disk = min(limits.disk_bytes, limits.memory_bytes)
    return {WORK: disk, "/tmp": disk, "/dev/shm": min(SHARED_MEMORY_BYTES, limits.memory_bytes)}  # noqa: S108  # the sandbox's own


def _writable(limits: JobLimits) -> Iterator[str]:
    for path, size in tmpfs_sizes(limits).items():
        yield from ("--perms", "1777", "--size", str(size), "--tmpfs", path)


def _limited(limits: JobLimits) -> tuple[str, ...]:
    """Inside the user namespace, so that the number of processes is that of this sandbox alone."""
    return (
        "/usr/bin/prlimit",
        f"--as={limits.address_space_bytes or limits.memory_bytes}",
        f"--nproc={limits.processes + OWN_PROCESSES}",
        f"--fsize={limits.disk_bytes}",
        f"--nofile={limits.open_files}",
        f"--cpu={int(limits.prepare_seconds + limits.seconds) + 1}",
        "--core=0",
        "--",
    )


class _MemoryFile:
    """Bytes behind a file descriptor that a child can read; closed on exit."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.number = -1

    def __enter__(self) -> Self:
        self.number = os.memfd_create("sandbox")
        with os.fdopen(self.number, "wb", closefd=False) as file:
            file.write(self._data)
        os.lseek(self.number, 0, os.SEEK_SET)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.number)


PROBE = Job((Step("probe", ("/bin/true",)),), limits=JobLimits(seconds=10.0))


async def unavailable(sandbox: Bubblewrap) -> str | None:
    """Why ``sandbox`` does not work on this machine; None: it works."""
    if platform.machine() not in seccomp.ARCHITECTURES:
        return f"no seccomp filter is known for {platform.machine()}"
    try:
        outcome = await sandbox.run(PROBE)
    except InfrastructureError as error:
        return str(error)
    worked = outcome.ending is Ending.EXITED and outcome.step("probe") is not None
    return None if worked else f"a first job ended as {outcome.ending}: {outcome.output.text[-500:]}"
