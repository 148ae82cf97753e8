from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest
from aiokafka import ConsumerRecord

from rollmill.cli.generate.files import with_table
from rollmill.cli.ledger.console import ledger_table
from rollmill.cli.tail import abbreviate, line
from rollmill.codec import DEAD_LETTER, JSON, MSGPACK, encode
from rollmill.errors import ConfigurationError
from rollmill.models import CompletionRecord, DeadLetterInfo, PolicyVersion, SampledChoice
from rollmill.ops.ledger import Balance
from rollmill.topics import COMPLETIONS, DEAD_LETTERS, STATE_BUILDER, Topic


def rollmill(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollmill.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def record_of(
    topic: Topic, value: bytes | None, headers: Sequence[tuple[str, bytes]] = ()
) -> ConsumerRecord[bytes, bytes]:
    return ConsumerRecord(
        topic.name, 3, 41, 0, 0, b"s-1", value, None, 3, 0 if value is None else len(value), tuple(headers)
    )


def completion(tokens: int) -> CompletionRecord:
    choice = SampledChoice(token_ids=list(range(tokens)), logprobs=[-0.5] * tokens)
    return CompletionRecord(session_id="s-1", completion_id="c-1", choices=(choice,))


def test_help_names_every_command() -> None:
    shown = rollmill("--help").stdout
    for command in ("up", "topics", "tail", "ledger", "dlq", "replay", "schemas", "version"):
        assert command in shown


def test_help_imports_neither_kafka_nor_models() -> None:
    check = (
        "import sys, rollmill.cli; "
        "heavy = {'aiokafka', 'numpy', 'pydantic', 'torch', 'faststream'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_topics_list_and_describe() -> None:
    assert "x.completions" in rollmill("topics", "list", "--prefix", "x.").stdout
    described = json.loads(rollmill("topics", "describe", "cuts").stdout)
    assert described["partitions"] == 1
    assert described["config"]["retention.ms"] == "-1"


def test_an_unknown_topic_is_one_line_of_advice() -> None:
    result = rollmill("topics", "describe", "nonsense")
    assert result.returncode == 70
    assert "known are completions" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [("ledger",), ("topics", "verify"), ("topics", "apply"), ("tail", "cuts")])
def test_a_cluster_that_does_not_answer_is_one_line_of_advice(command: tuple[str, ...]) -> None:
    result = rollmill(*command, "--bootstrap-servers", "127.0.0.1:1")
    assert result.returncode == 70
    assert "start it with `rollmill up`" in result.stderr
    assert "Traceback" not in result.stderr


def test_tail_abbreviates_arrays() -> None:
    record = record_of(COMPLETIONS, encode(completion(100), MSGPACK))
    shown = json.loads(line(COMPLETIONS, record))
    (choice,) = shown["value"]["choices"]
    assert (shown["partition"], shown["offset"], shown["key"]) == (3, 41, "s-1")
    assert choice["logprobs"] == "[-0.5, -0.5, -0.5, -0.5, -0.5, -0.5, … 100 in all]"
    full = json.loads(line(COMPLETIONS, record, full=True))
    assert full["value"]["choices"][0]["token_ids"] == list(range(100))


def test_tail_shows_what_cannot_be_decoded() -> None:
    shown = json.loads(line(COMPLETIONS, record_of(COMPLETIONS, b"{")))
    assert "malformed" in shown["undecodable"]
    assert json.loads(line(COMPLETIONS, record_of(COMPLETIONS, None)))["bytes"] is None
    assert json.loads(line(STATE_BUILDER, record_of(STATE_BUILDER, b"xyz")))["bytes"] == 3


def test_tail_shows_the_reason_of_a_dead_letter() -> None:
    info = DeadLetterInfo(reason="invalid", error="e", stage="builder", topic="completions", partition=3, offset=7)
    record = record_of(DEAD_LETTERS, b"??", [(DEAD_LETTER, encode(info, JSON))])
    assert json.loads(line(DEAD_LETTERS, record))["dead_letter"]["offset"] == 7


def test_short_arrays_and_texts_stay() -> None:
    value = {"a": [1, 2, 3], "b": ["x"] * 20, "c": [{"d": list(range(7))}]}
    shown = abbreviate(value)
    assert shown["a"] == [1, 2, 3]
    assert shown["b"] == ["x"] * 20
    assert shown["c"][0]["d"].endswith("7 in all]")


def test_the_ledger_table_names_reasons_and_the_verdict() -> None:
    balance = Balance()
    for totals in balance.of(PolicyVersion(0, 3), "to_256"):
        totals.captured, totals.trained = 10, 7
        totals.excluded["stale"] = 3
    assert "0:3" in ledger_table(balance)
    assert "excluded (stale): 3" in ledger_table(balance)
    (length,) = [line.split() for line in ledger_table(balance).splitlines() if "to_256" in line]
    assert length == ["to_256", "0", "10", "70.0%", "stale", "30.0%"]
    assert ledger_table(balance).endswith("balanced: nothing lost, nothing doubled")
    balance.total.lost = 2
    assert "NOT balanced: lost 2" in ledger_table(balance)


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="topics:begin"):
        with_table("# nothing here\n")


def test_the_version_is_an_option_too_and_topics_are_listed_as_json() -> None:
    assert rollmill("--version").stdout == rollmill("version").stdout == "0.1.0\n"
    listed = json.loads(rollmill("topics", "list", "--json").stdout)
    assert "rollmill.completions" in listed
