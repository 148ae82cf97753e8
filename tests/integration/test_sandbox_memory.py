"""Whatever a job does with all that an operator allows, the service that runs it stays small: it serves others, too."""

import asyncio
import sys

import orjson
import pytest

from rollmill.models.spec_maxima import SpecMaxima
from rollmill.strategies.sandbox import Sandbox
from rollmill_evaluator.sandbox.bubblewrap import Bubblewrap

MAXIMA = SpecMaxima()
ATTACKS = {
    "output": ("yes",),
    "long lines": (sys.executable, "-S", "-c", "while True: print('x' * 10**7)"),
    "both outputs": ("sh", "-c", "yes & yes >&2"),
    "files in memory": (
        "sh",
        "-c",
        "for f in /tmp/a /dev/shm/b c; do cat /dev/zero > $f & done; sleep 60",
    ),
    "memory": (sys.executable, "-S", "-c", "kept = [bytearray(2**20) for _ in range(10**5)]; print('kept it all')"),
    "fork storm": ("sh", "-c", "f() { f | f & }; f; sleep 60"),
    "storm of files": (sys.executable, "-S", "-c", "for n in range(10**9): open(f'/tmp/{n}', 'w').close()"),
}
RUN = """
import asyncio, json, pathlib, re, sys
from rollmill.strategies.sandbox import Job, JobLimits, Step
from rollmill_evaluator.sandbox.bubblewrap import Bubblewrap
program, uid, argv, limits = json.loads(sys.argv[1])
job = Job((Step("attack", tuple(argv)),), limits=JobLimits(**limits))
outcome = asyncio.run(Bubblewrap(pathlib.Path(program), uid).run(job))
# The peak of this program; getrusage counts its parent's, too.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())
print(json.dumps([outcome.ending, "kept it all" in outcome.output.text, int(peak[1]) // 1024]))
"""


@pytest.mark.parametrize("attack", ATTACKS)
async def test_f5_the_service_stays_below_300_mib(sandbox: Sandbox, attack: str) -> None:
    assert isinstance(sandbox, Bubblewrap)
    limits = {
        "seconds": 4.0,
        "memory_bytes": MAXIMA.memory_mib * 2**20,
        "disk_bytes": MAXIMA.disk_mib * 2**20,
        "processes": MAXIMA.processes,
        "output_bytes": 2**40,  # more than any operator allows: the sandbox has a bound of its own
    }
    asked = orjson.dumps([str(sandbox.program), sandbox.uid, ATTACKS[attack], limits]).decode()
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN, asked, stdout=asyncio.subprocess.PIPE)
    printed, _ = await service.communicate()
    ending, has_kept_all, mebibytes = orjson.loads(printed)
    assert ending in {"timed_out", "exhausted", "exited"}, ending
    assert not has_kept_all
    assert mebibytes < 300
