"""README's quick start, as it is printed, from an empty environment with the wheel to trained tokens (A6)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollmill.runtime.supervisor import free_port

pytestmark = [pytest.mark.kafka, pytest.mark.e2e]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SECONDS = 180


def example(name: str) -> str:
    found = re.search(rf"<!-- example: {re.escape(name)} -->\n```bash\n(.*?)```", README, re.DOTALL)
    assert found is not None, name
    return found.group(1)


class Shell:
    """Runs the README's lines in one folder, with the environment's programs first on PATH."""

    def __init__(self, bin_directory: Path, directory: Path) -> None:
        self.engine_port, self.port, kafka = free_port(), free_port(), free_port()
        self.directory = directory
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ROLLMILL_", "PYTHON"))},
            "PATH": f"{bin_directory}:{os.environ['PATH']}",
            "ROLLMILL_CAPTURE_URL": f"http://127.0.0.1:{self.port}",
            "ROLLMILL_BOOTSTRAP_SERVERS": f"127.0.0.1:{kafka}",
            "PYTHONUNBUFFERED": "1",
        }
        self.options = f" --port {self.port} --kafka-port {kafka}"

    def run(self, script: str) -> str:
        ended = subprocess.run(
            ["bash", "-ec", script],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    @contextmanager
    def running(self, command: str, ready: str) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on; entered once it has printed ``ready``, and ended with SIGTERM."""
        environment = {name: value for name, value in self.environment.items() if name != "ROLLMILL_BOOTSTRAP_SERVERS"}
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        lines: list[str] = []
        try:
            for line in process.stdout:
                lines.append(line)
                if ready in line:
                    break
            assert ready in "".join(lines[-1:]), "".join(lines)
            yield process
        finally:
            process.send_signal(signal.SIGTERM)  # SIGINT is ignored below a shell's background job
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()
                process.communicate()


def test_a6_the_quick_start_ends_in_trained_tokens(install: Callable[[str], Path], tmp_path: Path) -> None:
    install_line, init = example("install.sh").strip().splitlines()
    assert install_line == "pip install 'rollmill[services,embedded]'"
    shell = Shell(install("services,embedded").parent, tmp_path)
    shell.run(init)
    shell.directory = tmp_path / "my-run"
    engine = f"{example('engine.sh').strip()} --port {shell.engine_port}"
    up = example("up.sh").strip().replace(":8000", f":{shell.engine_port}") + shell.options
    with shell.running(engine, "toy engine: "), shell.running(up, "Ctrl-C drains"):
        printed = shell.run(example("train.sh"))
        assert "step 3: 16 tokens to train, policy 0:3" in printed
        assert "balanced: nothing lost, nothing doubled" in printed
        balance = json.loads(shell.run("rollmill ledger --json"))
    assert (balance["captured"], balance["trained"]) == (64, 64)
