"""What untrusted code tries, and does not get: every attempt fails, and the sandbox serves the next job."""

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rollmill.errors import InfrastructureError
from rollmill.strategies.sandbox import WORK, Ending, Job, JobLimits, JobOutcome, NoSandbox, Sandbox, Step
from rollmill.testing.processes import processes_with, until_gone
from rollmill_evaluator.sandbox.selection import SandboxOptions, local_sandbox

LIMITS = JobLimits(
    seconds=30.0,
    prepare_seconds=30.0,
    memory_bytes=96 * 2**20,
    address_space_bytes=64 * 2**20,
    processes=24,
    disk_bytes=4 * 2**20,
    output_bytes=8192,
)
Attempt = Callable[..., Awaitable[JobOutcome]]


@pytest.fixture
async def attempt(sandbox: Sandbox) -> AsyncIterator[Attempt]:
    """Runs Python inside of the sandbox; afterwards the sandbox has to serve again."""

    async def run(code: str, *arguments: object, limits: JobLimits = LIMITS) -> JobOutcome:
        words = ("/bin/sh", "-c", f'exec {sys.executable} -S "$@"', "sh", "/attempt.py", *map(str, arguments))
        return await sandbox.run(Job((Step("attempt", words),), files={"/attempt.py": code.encode()}, limits=limits))

    yield run
    assert (await sandbox.run(Job((Step("a", ("echo", "serving")),)))).output.text == "serving\n"


def refused(outcome: JobOutcome) -> None:
    """Each attempt prints ``tried`` at its end, and ``escaped`` only where it got what it wanted."""
    assert "escaped" not in outcome.output.text, outcome.output.text
    assert outcome.output.text.endswith("tried\n"), (outcome.ending, outcome.output.text)


TRYING = """\
import os, sys
def attempt(action):
    try:
        action()
        print("escaped")
    except BaseException as error:
        print(type(error).__name__, error)
"""

SYSTEM = {
    "write /usr": 'attempt(lambda: open("/usr/new", "w"))',
    "write /etc": 'attempt(lambda: open("/etc/passwd", "a"))',
    "write the root": 'attempt(lambda: open("/new", "w"))',
    "write /dev": 'attempt(lambda: open("/dev/new", "w"))',
    "core_pattern": 'attempt(lambda: open("/proc/sys/kernel/core_pattern", "w"))',
    "sysrq": 'attempt(lambda: open("/proc/sysrq-trigger", "w"))',
    "oom_score of the first process": 'attempt(lambda: open("/proc/1/oom_score_adj", "w").write("-1000"))',
    "a device": 'attempt(lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)))',
    "chroot": 'attempt(lambda: os.chroot("/usr"))',
    "another user": "attempt(lambda: os.setuid(0))",
    "a supplementary group": "attempt(lambda: os.setgroups([0]))",
    "higher limits": (
        "import resource; attempt(lambda: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2))"
    ),
    "the clock": "import time; attempt(lambda: time.clock_settime(time.CLOCK_REALTIME, 0))",
    "capabilities of any process": (
        'attempt(lambda: [1 / (set("0\\n") >= set(line[8:])) for pid in filter(str.isdigit, os.listdir("/proc"))'
        ' for line in open(f"/proc/{pid}/status") if line.startswith(("CapPrm", "CapEff"))] and 1 / 0)'
    ),
    "a terminal": 'attempt(lambda: open("/dev/tty"))',
}
CALLS = {
    "mount": '"mount", b"none", b"/sandbox", b"tmpfs", 0, None',
    "a user namespace": '"unshare", 0x10000000',
    "a network namespace": '"unshare", 0x40000000',
    "memory that nobody counts": '"memfd_create", b"x", 0',
    "a shared segment": '"shmget", 0, 4096, 0o1600',
    "type into a terminal": '"ioctl", 0, 0x5412, b"x"',
    "a terminal's selection": '"ioctl", 0, 0x541C, b"x"',
    "the kernel's log": '"klogctl", 3, b"x" * 100, 100',
}
SOCKETS = {"vsock": 40, "packet": 17, "bluetooth": 31, "alg": 38}


@pytest.mark.parametrize("name", SYSTEM)
async def test_the_system_stays_as_it_is(attempt: Attempt, name: str) -> None:
    refused(await attempt(f'{TRYING}{SYSTEM[name]}\nprint("tried")'))


@pytest.mark.parametrize("name", CALLS)
async def test_system_calls_are_refused(attempt: Attempt, name: str) -> None:
    code = f"""{TRYING}
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
attempt(lambda: call({CALLS[name]}))
print("tried")"""
    refused(await attempt(code))


@pytest.mark.parametrize("name", SOCKETS)
async def test_socket_families_that_no_namespace_confines_are_refused(attempt: Attempt, name: str) -> None:
    code = f'{TRYING}import socket; attempt(lambda: socket.socket({SOCKETS[name]}, 3)); print("tried")'
    refused(await attempt(code))
    stream = f'{TRYING}import socket; attempt(lambda: socket.socket({SOCKETS[name]}, 1)); print("tried")'
    refused(await attempt(stream))


@pytest.fixture
def listening() -> Iterator[tuple[int, str, str]]:
    """Servers of this machine: a port on loopback, an abstract socket, and a socket in /tmp."""
    name, folder = f"rollmill-{time.time_ns()}", Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as tcp,
        closing(socket.socket(socket.AF_UNIX)) as abstract,
        closing(socket.socket(socket.AF_UNIX)) as named,
    ):
        abstract.bind(f"\0{name}")
        named.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        for one in (tcp, abstract, named):
            one.listen()
            one.settimeout(0)
        yield tcp.getsockname()[1], name, str(folder / "socket")
        for one in (tcp, abstract, named):
            with pytest.raises(BlockingIOError):
                one.accept()
    (folder / "socket").unlink()
    folder.rmdir()


async def test_nobody_outside_is_reached(attempt: Attempt, listening: tuple[int, str, str]) -> None:
    code = f"""{TRYING}
import socket
port, abstract, named = int(sys.argv[1]), sys.argv[2], sys.argv[3]
attempt(lambda: socket.create_connection(("127.0.0.1", port), 2))
attempt(lambda: socket.socket(socket.AF_UNIX).connect("\\0" + abstract))
attempt(lambda: socket.socket(socket.AF_UNIX).connect(named))
attempt(lambda: socket.create_connection(("192.0.2.1", 80), 2))
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)))
attempt(lambda: socket.getaddrinfo("example.com", 80))
print("tried")"""
    refused(await attempt(code, *listening))


async def test_secrets_of_the_service_and_the_machine_are_not_there(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROLLMILL_API_KEY", "hush-environment")
    secret = tmp_path / "secret"
    secret.write_text("hush-file")
    code = f"""{TRYING}
import glob, pathlib
seen = b""
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline") + [sys.argv[1]]:
    try:
        seen += pathlib.Path(path).read_bytes()
    except OSError as error:
        print(type(error).__name__, path)
for link in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        seen += os.readlink(link).encode()
    except OSError:
        pass
if b"hush" in seen:
    print("escaped")
for path in ("/etc/shadow", "/proc/1/root/etc/shadow", "/proc/kcore", "/run/secrets", "/var/run/docker.sock"):
    attempt(lambda: open(path, "rb").read(1) or 1 / 0)
for path in ("/home", "/var", "/run", "/sys", "/boot", "/mnt"):
    attempt(lambda: os.listdir(path))
print("tried")"""
    refused(await attempt(code, secret))


async def test_processes_outside_are_neither_seen_nor_ended(attempt: Attempt) -> None:
    outside = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        code = f"""{TRYING}
import signal
for pid in map(int, sys.argv[1:]):
    attempt(lambda: os.kill(pid, signal.SIGKILL))
print("tried")"""
        refused(await attempt(code, outside.pid, os.getpid()))
        outcome = await attempt("import os, signal; os.kill(-1, signal.SIGKILL)")
        assert outcome.ending is Ending.DIED
        assert outcome.steps == ()
        assert outside.returncode is None
    finally:
        outside.kill()
        await outside.wait()


async def test_a_shell_that_is_killed_is_no_exit_code(attempt: Attempt) -> None:
    outcome = await attempt("import os, signal; print('all passed'); os.kill(os.getppid(), signal.SIGKILL)")
    assert outcome.ending is Ending.DIED
    assert outcome.step("attempt") is None


async def test_a_sandbox_that_is_killed_from_outside_is_infrastructure(sandbox: Sandbox) -> None:
    marker = f"{time.time_ns() % 10**9}4"
    job = Job((Step("sleep", ("sleep", marker)),), environment={"MARKER": marker})
    running = asyncio.create_task(sandbox.run(job))
    async with asyncio.timeout(30):
        while len(found := await processes_with(marker)) < 3:
            continue
    os.kill(min(found), signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="ended from outside"):
        await running
    await until_gone(marker)


FORKS = """
import os, time
children = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
    except OSError:
        print(children, flush=True)
        break
time.sleep(60)
"""
BOMB = "bomb() { bomb | bomb & }; bomb; sleep 60"


async def test_a_fork_bomb_is_counted_out(attempt: Attempt) -> None:
    """By the kernel where another user runs it; where root stays root, it is killed when it is seen."""
    outcome = await attempt(FORKS, limits=replace(LIMITS, seconds=1.0, memory_bytes=2**30))
    if outcome.ending is Ending.TIMED_OUT:
        assert int(outcome.output.text) <= LIMITS.processes + 6
    else:
        assert outcome.ending is Ending.EXHAUSTED
    assert outcome.seconds < 25


async def test_a_fork_bomb_of_another_user_is_counted_out_by_the_kernel(sandbox_options: SandboxOptions) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can run a sandbox as another user")
    other = await local_sandbox(replace(sandbox_options, uid=65534, tools=())).found()
    if isinstance(other, NoSandbox):
        pytest.skip(other.why)
    limits = replace(LIMITS, seconds=1.0, memory_bytes=2**30)
    outcome = await other.run(Job((Step.shell("bomb", BOMB),), limits=limits))
    assert outcome.ending in {Ending.TIMED_OUT, Ending.EXITED, Ending.DIED}
    assert b"fork" in outcome.output.head
    assert (await other.run(Job((Step("a", ("id", "-u")),)))).output.text == "1000\n"


async def test_one_process_gets_no_more_memory_than_its_share(attempt: Attempt) -> None:
    outcome = await attempt(f'{TRYING}attempt(lambda: bytearray({LIMITS.memory_bytes})); print("tried")')
    refused(outcome)
    assert "MemoryError" in outcome.output.text


async def test_many_processes_get_no_more_memory_than_the_job(attempt: Attempt) -> None:
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        block = bytearray(os.urandom(1) * (40 * 2**20))
        time.sleep(60)
time.sleep(60)
"""
    outcome = await attempt(code)
    assert outcome.ending is Ending.EXHAUSTED
    assert outcome.seconds < 25


@pytest.mark.parametrize("place", [WORK, "/tmp", "/dev/shm", "/dev", "/", "/usr", "/proc", "/etc"])  # noqa: S108  # inside of the sandbox
async def test_no_disk_is_filled(attempt: Attempt, place: str) -> None:
    code = f"""{TRYING}
written = 0
try:
    for number in range(200):
        with open(f"{place}/fill{{number}}", "wb", buffering=0) as file:
            written += file.write(bytes(2**20))
except OSError as error:
    print(error)
print("escaped" if written > 70 * 2**20 else written)
print("tried")"""
    outcome = await attempt(code)
    refused(outcome)
    if place in {WORK, "/tmp"}:  # noqa: S108  # inside of the sandbox
        assert f"\n{LIMITS.disk_bytes}\n" in outcome.output.text


STORE = """
import sys, time
for number, place in enumerate(sys.argv[1:]):
    with open(f"{place}/stored{number}", "wb") as file:
        for _ in range(60):
            file.write(bytes(2**20))
print("stored", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("places", [(WORK, "/tmp"), (WORK, "/dev/shm"), ("/tmp", "/dev/shm")])  # noqa: S108  # inside of the sandbox
async def test_f5_what_is_stored_in_memory_counts_as_memory(attempt: Attempt, places: tuple[str, str]) -> None:
    outcome = await attempt(STORE, *places, limits=replace(LIMITS, disk_bytes=2**30))
    assert outcome.ending is Ending.EXHAUSTED
    assert outcome.seconds < 25


async def test_f5_what_is_stored_and_what_is_used_count_together(attempt: Attempt) -> None:
    limits = replace(LIMITS, disk_bytes=2**30, address_space_bytes=None)
    outcome = await attempt(f"block = b'x' * (50 * 2**20)\n{STORE}", "/tmp", limits=limits)  # noqa: S108  # inside of the sandbox
    assert outcome.ending is Ending.EXHAUSTED


async def test_f5_a_disk_is_no_larger_than_the_memory(attempt: Attempt) -> None:
    code = f"""
import os
for place in ("{WORK}", "/tmp", "/dev/shm"):
    found = os.statvfs(place)
    print(found.f_blocks * found.f_frsize <= {LIMITS.memory_bytes})
"""
    outcome = await attempt(code, limits=replace(LIMITS, disk_bytes=10**15))
    assert outcome.output.text == "True\nTrue\nTrue\n"


async def test_a_full_disk_hides_no_exit_code(attempt: Attempt) -> None:
    code = """
import sys
try:
    for place in ("/tmp", "."):
        open(f"{place}/fill", "wb").write(bytes(100 * 2**20))
except (OSError, MemoryError):
    pass
sys.exit(5)
"""
    outcome = await attempt(code)
    assert outcome.steps[-1].exit_code == 5


async def test_endless_output_costs_no_memory(attempt: Attempt) -> None:
    outcome = await attempt("while True: print('x' * 100000)", limits=replace(LIMITS, seconds=1.0))
    assert outcome.ending is Ending.TIMED_OUT
    assert len(outcome.output.head) + len(outcome.output.tail) == LIMITS.output_bytes
    assert outcome.output.dropped > 2**20


async def test_endless_reports_cost_no_memory_and_change_nothing(attempt: Attempt) -> None:
    """The reports' stream is within reach of code that looks for it."""
    code = """
import os
for pid in os.listdir("/proc"):
    if pid.isdigit() and int(pid) != os.getpid():
        try:
            with open(f"/proc/{pid}/fd/3", "wb", buffering=0) as stream:
                for _ in range(300):
                    stream.write(b"nonsense 1 2 3\\n" * 5000)
        except OSError:
            pass
print("done")
"""
    outcome = await attempt(code)
    assert outcome.output.text == "done\n"


async def test_a_machine_that_forbids_user_namespaces_says_so(sandbox: Sandbox) -> None:
    code = """
import asyncio, pathlib
from rollmill_evaluator.sandbox.selection import SandboxOptions, local_sandbox
print(asyncio.run(local_sandbox(SandboxOptions(uid=0)).found()).why)
"""
    program = str(getattr(sandbox, "program", ""))
    service = await asyncio.create_subprocess_exec(
        *(program, "--unshare-user", "--disable-userns", "--dev-bind", "/", "/", sys.executable, "-c", code),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await service.communicate()
    assert b"Creating new namespace failed" in said
    assert b"It needs user namespaces" in said


@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGTERM])
async def test_a_killed_service_leaves_no_job_behind(sandbox: Sandbox, signalled: signal.Signals) -> None:
    marker = f"{time.time_ns() % 10**9}5"
    code = f"""
import asyncio, pathlib
from rollmill.strategies.sandbox import Job, Step
from rollmill_evaluator.sandbox.bubblewrap import Bubblewrap
sandbox = Bubblewrap(pathlib.Path({str(getattr(sandbox, "program", ""))!r}), {getattr(sandbox, "uid", None)!r})
asyncio.run(sandbox.run(Job((Step.shell("s", "setsid sleep {marker} & sleep {marker}"),))))
"""
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    try:
        async with asyncio.timeout(20):
            while len(await processes_with(marker)) < 2:
                continue
    finally:
        service.send_signal(signalled)
        await service.wait()
    await until_gone(marker)
