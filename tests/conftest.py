"""Fixtures for all tests, and how many examples hypothesis tries.

``ROLLMILL_HYPOTHESIS_PROFILE``: ``ci`` (the default) tries the same examples in every run, ``fuzz`` tries
``ROLLMILL_FUZZ_EXAMPLES`` new ones and remembers what failed.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from rollmill.strategies.sandbox import NoSandbox, Sandbox
from rollmill.testing.requirements import fail_in_ci_or_skip
from rollmill_evaluator.sandbox.selection import SandboxOptions, container_sandbox, local_sandbox
from rollmill_evaluator.settings import EvaluatorSettings

pytest_plugins = ["rollmill.testing.kafka", "rollmill.testing.prometheus"]

SLOW = [HealthCheck.too_slow]

settings.register_profile("ci", max_examples=100, derandomize=True, deadline=None, suppress_health_check=SLOW)
settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("ROLLMILL_FUZZ_EXAMPLES", "50000")),
    deadline=None,
    print_blob=True,
    suppress_health_check=SLOW,
)
settings.load_profile(os.environ.get("ROLLMILL_HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def sandbox_options() -> SandboxOptions:
    """Sandboxes with this Python and its packages in them.

    Where that Python lies in a folder that only root may enter, root stays root in the sandbox's user namespace.
    """
    tools = tuple(dict.fromkeys(Path(place) for place in (sys.base_prefix, sys.prefix)))
    shut = any(not parent.stat().st_mode & stat.S_IXOTH for tool in tools for parent in (tool, *tool.parents))
    made = EvaluatorSettings(sandbox_tools=tools, sandbox_uid=0 if shut else 65534)
    return made.sandboxes


@pytest.fixture
async def sandbox(sandbox_options: SandboxOptions) -> Sandbox:
    """This machine's sandbox; where there is none, the test is skipped with the reason, and in CI it fails."""
    found = await local_sandbox(sandbox_options).found()
    if isinstance(found, NoSandbox):
        fail_in_ci_or_skip(found.why)
    return found


@pytest.fixture
async def containers(sandbox_options: SandboxOptions) -> Sandbox:
    """Containers; where no engine answers, the test is skipped with the reason."""
    found = await container_sandbox(sandbox_options).found()
    if isinstance(found, NoSandbox):
        pytest.skip(found.why)
    return found


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A folder that other users may enter: whoever runs a sandbox can read what lies in it."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path
