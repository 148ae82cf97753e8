"""Every mistake in the settings is one line that names the variable, in any program (A3, A4, B2, B3)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmill.cli.commands import app
from rollmill.cli.settings_report import as_table, found
from rollmill.errors import ConfigurationError
from rollmill.settings import ClientSettings, KafkaSettings, ProgramSettings, ServiceSettings, load
from rollmill.settings.loading import mistakes_of
from rollmill.settings.programs import program_settings
from rollmill_batcher.settings import BatcherSettings
from rollmill_capture.settings import CaptureSettings

SERVICES = ("capture", "builder", "evaluator", "reward-merger", "batcher")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("ROLLMILL_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def service(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"rollmill_{name.replace('-', '_')}", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("kind", "variable", "value", "line"),
    [
        (
            BatcherSettings,
            "MAX_STALENESS",
            "-3",
            "ROLLMILL_MAX_STALENESS=-3: input should be greater than or equal to 0",
        ),
        (KafkaSettings, "PARTITIONS", "abc", "ROLLMILL_PARTITIONS=abc: input should be a valid integer"),
        (KafkaSettings, "PREFIX", "rollmill", "ROLLMILL_PREFIX=rollmill: it has to end with a dot, such as rollmill."),
        (CaptureSettings, "ROUTES", "{x", "ROLLMILL_ROUTES has to be JSON: Expecting property name"),
        (CaptureSettings, "API_KEYS", '{"a": 7}', "ROLLMILL_API_KEYS.a: input should be a valid string"),
        (ServiceSettings, "LOG_LEVEL", "loud", "ROLLMILL_LOG_LEVEL=LOUD: input should be 'DEBUG', 'INFO'"),
        (KafkaSettings, "SESSION_TIMEOUT_MS", "30000", "ROLLMILL_SESSION_TIMEOUT_MS 30000 must be at least 5000 below"),
        (KafkaSettings, "SASL_PASSWORD", "x", None),
    ],
)
def test_a3_a_bad_value_is_one_line_with_the_variable(
    kind: type[KafkaSettings], variable: str, value: str, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ROLLMILL_{variable}", value)
    if line is None:
        assert load(kind)
        return
    with pytest.raises(ConfigurationError) as caught:
        load(kind)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a3_all_mistakes_are_named_at_once_and_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PARTITIONS", "0"), ("BATCH_PARTITIONS", "x"), ("ADMIN_KEY_SHA256", "hush")):
        monkeypatch.setenv(f"ROLLMILL_{name}", value)
    lines = mistakes_of(CaptureSettings)
    assert [line.split(":")[0] for line in lines] == [
        "ROLLMILL_PARTITIONS=0",
        "ROLLMILL_BATCH_PARTITIONS=x",
        "ROLLMILL_ADMIN_KEY_SHA256",
    ]
    assert "hush" not in str(lines)


def test_b3_an_unknown_variable_is_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_MAX_STALENES", "9")
    for kind in (KafkaSettings, BatcherSettings, ClientSettings):
        with pytest.raises(ConfigurationError, match="MAX_STALENES is no setting; did you mean ROLLMILL_MAX_STALENESS"):
            load(kind)


@pytest.mark.parametrize(
    "name",
    ["SESSION_ID", "CAPTURE_SERVICE_HOST", "CAPTURE_SERVICE_PORT_HTTP", "CAPTURE_PORT", "CAPTURE_PORT_8700_TCP_ADDR"],
)
def test_variables_of_agents_and_of_kubernetes_are_no_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ROLLMILL_{name}", "tcp://10.0.0.1:8700")
    assert load(KafkaSettings)


def test_the_file_is_below_the_environment_and_its_sections_above_its_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rollmill.toml").write_text(
        'prefix = "file."\npartitions = 3\nmax_staleness = 1\n[batcher]\nmax_staleness = 2\n[capture.routes.m]\n'
        'engine = "vllm"\n'
    )
    monkeypatch.setenv("ROLLMILL_PARTITIONS", "5")
    batcher = load(BatcherSettings)
    assert (batcher.prefix, batcher.partitions, batcher.max_staleness) == ("file.", 5, 2)
    assert load(BatcherSettings, prefix="given.").prefix == "given."
    assert list(load(CaptureSettings).routes) == ["m"]
    shown = {item.name: item for item in found("batcher")}
    assert [shown[f"ROLLMILL_{name}"].origin for name in ("PREFIX", "PARTITIONS", "SEED")] == [
        "rollmill.toml",
        "environment",
        "default",
    ]
    assert "file.  (rollmill.toml)" in as_table(list(shown.values()))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("max_stalenes = 2", "max_stalenes is no setting; did you mean max_staleness?"),
        ("[batcher]\nprot = 3", r"\[batcher\] prot is no setting"),
        ("[bacher]\nseed = 3", "bacher is no setting; did you mean batcher?"),
        ("prefix = ", "cannot be read as TOML"),
        ("partitions = 0", "rollmill.toml: partitions=0: input should be greater than 0"),
    ],
)
def test_a_mistake_in_the_file_is_named_by_its_place(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "rollmill.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=line):
        load(BatcherSettings)


def test_a_file_that_is_named_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_CONFIG", "no.toml")
    with pytest.raises(ConfigurationError, match=r"the settings file no\.toml .* is not there"):
        load(KafkaSettings)


def test_lists_from_the_file_reach_the_strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_STRATEGY_MODULES", "")
    (tmp_path / "rollmill.toml").write_text('strategy_modules = "mine"\n')
    monkeypatch.delenv("ROLLMILL_STRATEGY_MODULES")
    load(BatcherSettings)
    assert os.environ["ROLLMILL_STRATEGY_MODULES"] == "mine"
    monkeypatch.delenv("ROLLMILL_STRATEGY_MODULES")


@pytest.mark.parametrize("name", SERVICES)
def test_a3_a_service_with_a_bad_setting_ends_with_70_and_one_line(name: str) -> None:
    ended = service(name, ROLLMILL_PARTITIONS="-1")
    assert (ended.returncode, ended.stdout) == (70, "")
    assert ended.stderr == "rollmill: ROLLMILL_PARTITIONS=-1: input should be greater than 0\n"


@pytest.mark.parametrize("name", SERVICES)
def test_b2_a_service_answers_help_and_refuses_other_arguments(name: str) -> None:
    helped, refused = service(name, "--help"), service(name, "--verbose")
    assert (helped.returncode, f"Run the {name} until SIGTERM" in helped.stdout) == (0, True)
    assert (refused.returncode, "unrecognized arguments: --verbose" in refused.stderr) == (2, True)


def test_a_service_reads_the_file_that_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('prefix = "mine."\n')
    shown = service("builder", "--config", "mine.toml", "--print-config")
    assert '"prefix": "mine."' in shown.stdout


def test_config_check_and_the_commands_tell_mistakes_apart_from_results(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["config", "check"]).exit_code == 0
    monkeypatch.setenv("ROLLMILL_GROUPS_PER_STEP", "many")
    checked = runner.invoke(app, ["config", "check"])
    assert checked.exit_code == 3
    assert checked.output.count("ROLLMILL_GROUPS_PER_STEP=many") == 1


@pytest.mark.parametrize("arguments", [["ledger", "--prefix", "rollmill"], ["dlq", "list", "--prefix", "rollmill"]])
def test_a4_a_wrong_prefix_is_70_and_never_the_code_of_lost_tokens(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "rollmill.cli", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 70
    assert ended.stderr == "rollmill: --prefix=rollmill: it has to end with a dot, such as rollmill.\n"


def test_every_setting_has_a_description() -> None:
    kinds: list[type[ProgramSettings]] = [KafkaSettings, ClientSettings, *program_settings().values()]
    for kind in kinds:
        assert [name for name, field in kind.model_fields.items() if not field.description] == []
