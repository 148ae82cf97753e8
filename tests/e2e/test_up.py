"""`rollmill up`, and the README's examples for it, as they are printed (ports and the time they take apart)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollmill.runtime.supervisor import free_port

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("curl") is None, reason="the README's examples use curl"),
]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SECONDS = 120


class Running:
    """`rollmill up` with the demo's toy model behind it, on ports of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engine_port, self.port, self.kafka_port = free_port(), free_port(), free_port()
        self.lines: list[str] = []

    def start_engine(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "examples")}
        command = [sys.executable, "-m", "relay.engine", "--port", str(self.engine_port)]
        engine = subprocess.Popen(command, env=environment)
        wait = ["curl", "-sS", "--retry", "60", "--retry-delay", "1", "--retry-connrefused"]
        subprocess.run([*wait, f"http://127.0.0.1:{self.engine_port}/health"], check=True, timeout=90)
        return engine

    @contextmanager
    def up(self) -> Iterator[subprocess.Popen[str]]:
        """The command, running; it must have ended by itself when the block ends without an error."""
        process = self._start()
        try:
            yield process
            process.wait(SECONDS)
        finally:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        ports = ["--port", str(self.port), "--kafka-port", str(self.kafka_port)]
        upstream = ["--upstream", f"http://127.0.0.1:{self.engine_port}"]
        command = [sys.executable, "-m", "rollmill.cli", "up", *upstream, *ports, "--data-dir", str(self.directory)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def read_until(self, process: subprocess.Popen[str], text: str) -> None:
        """Read the command's output up to a line with ``text``; the whole of it when the program ends before."""
        killer = threading.Timer(SECONDS, process.kill)
        killer.start()
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line)
            if text in line:
                break
        killer.cancel()
        assert any(text in line for line in self.lines), "".join(self.lines)

    def shell(self, name: str) -> str:
        """Run a shell example of the README; returns what it prints."""
        found = re.search(rf"<!-- example: {re.escape(name)} -->\n```bash\n(.*?)```", README, re.DOTALL)
        assert found is not None
        script = found.group(1).replace(":8700", f":{self.port}")
        result = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def rollmill(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "rollmill.cli", *arguments]
        environment = {**os.environ, "ROLLMILL_BOOTSTRAP_SERVERS": f"127.0.0.1:{self.kafka_port}"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    engine = running.start_engine()
    try:
        yield running
    finally:
        engine.terminate()
        engine.wait(30)


def test_the_readme_examples_work_and_a_restart_keeps_the_data(running: Running) -> None:
    with running.up() as process:
        running.read_until(process, "Ctrl-C drains")
        opened = json.loads(running.shell("open.sh"))
        assert opened["base_url"] == f"http://127.0.0.1:{running.port}/sessions/hello-1/v1"
        reply = json.loads(running.shell("call.sh"))
        assert reply["choices"][0]["message"]["role"] == "assistant"
        assert json.loads(running.shell("close.sh"))["state"] == "closed"
        trajectory = json.loads(running.rollmill("tail", "trajectories", "--from-beginning", "--limit", "1"))
        assert trajectory["key"] == "hello-1"
        assert trajectory["value"]["traces"][0]["reward"] == 1.0
        before = json.loads(running.rollmill("ledger", "--json"))
        assert before["balanced"]
        assert before["captured"] == reply["usage"]["completion_tokens"]
        process.send_signal(signal.SIGINT)
        running.read_until(process, "drained")
    assert process.returncode == 0
    with running.up() as process:
        running.read_until(process, "Ctrl-C drains")
        assert json.loads(running.rollmill("ledger", "--json"))["captured"] == before["captured"]
        assert json.loads(running.shell("open.sh"))["error"]["code"] == 409
        process.terminate()
    assert process.returncode == 0


def test_a_service_that_cannot_start_stops_everything_and_names_its_error(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_ADVANTAGE", "nope")
    with running.up() as process:
        out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 70
    assert re.search("batcher ended with 70 before it was ready: .*'nope'", out)
    assert "Traceback" not in out
    assert "builder: exit code 0" in out


def test_a5_a_second_up_beside_living_services_is_refused(running: Running, tmp_path: Path) -> None:
    with running.up() as process:
        running.read_until(process, "Ctrl-C drains")
        assert any(line.startswith("metrics: capture http://127.0.0.1:") for line in running.lines)
        targets = json.loads((running.directory / "metrics-targets.json").read_text())
        assert [entry["labels"]["service"] for entry in targets][:2] == ["capture", "builder"]
        address = f"127.0.0.1:{running.kafka_port}"
        command = [sys.executable, "-m", "rollmill.cli", "up", "--upstream", f"http://127.0.0.1:{running.engine_port}"]
        options = ["--bootstrap-servers", address, "--port", str(free_port()), "--data-dir", str(tmp_path / "second")]
        second = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 70
        assert f"services of another process serve the prefix 'rollmill.' on {address}" in second.stderr
        running.read_until(process, "since the start: sessions ended 0")
        process.send_signal(signal.SIGINT)
        running.read_until(process, "drained")
