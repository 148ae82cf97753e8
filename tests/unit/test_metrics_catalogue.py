"""The catalogue of metrics, and what happens to a measurement that it does not know."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollmill.cli.ledger.exporter import export_balance, fates
from rollmill.models import CallKind, CallStatus, Purpose, SessionStatus
from rollmill.ops.ledger import Balance, Totals
from rollmill.ops.ledger.balance import BUCKETS
from rollmill.runtime.telemetry.catalogue import CATALOGUE, COMPONENTS, Kind, Metric, metrics_of
from rollmill.runtime.telemetry.metrics import MOST_SERIES, Metrics, UndeclaredMetricError
from rollmill_batcher.groups.group import CLOSED
from rollmill_batcher.steps.cut_metrics import LARGEST_STALENESS, LENGTH_BOUNDS
from rollmill_capture.model_config import EngineKind
from rollmill_capture.upstream.formats.parsed_reply import EMPTY_ARGUMENTS, NOT_PARSED
from rollmill_evaluator.settings import EvaluatorSettings
from rollmill_evaluator.worker import begin_counting

ROOT = Path(__file__).parents[2]
MEASURES = re.compile(r"metrics\.(count|gauge|observe)\(\s*\"([a-z_]+)\"")


def series(metrics: Metrics) -> dict[str, list[dict[str, str]]]:
    """Labels of every series, by its name as scraped."""
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            found[sample.name].append(sample.labels)
    return found


@pytest.mark.parametrize("component", COMPONENTS)
def test_everything_known_beforehand_is_exported_as_zero_from_the_start(component: str) -> None:
    found = series(Metrics(component, "demo."))
    common = {"component": component, "prefix": "demo."}
    for metric in metrics_of(component).values():
        name = metric.full_name + ("_count" if metric.kind is Kind.HISTOGRAM else "")
        for labels in metric.known():
            assert {**common, **labels} in found[name], metric.name


def test_evaluators_that_the_process_knows_are_exported_as_zero_before_the_first_evaluation() -> None:
    metrics = Metrics("evaluator")
    begin_counting(metrics, EvaluatorSettings(evaluator_concurrency_of={"mine.grading:Grader": 4}))
    for name, is_known in (("reported", True), ("mine.grading:Grader", True), ("external", False)):
        timed = metrics.registry.get_sample_value("rollmill_evaluation_seconds_count", {"evaluator": name})
        labels = {"evaluator": name, "verdict": "graded"}
        assert [timed, metrics.registry.get_sample_value("rollmill_evaluations_total", labels)] == (
            [0, 0] if is_known else [None, None]
        )


@pytest.mark.parametrize("component", COMPONENTS)
def test_even_a_metric_without_series_is_described(component: str) -> None:
    text = Metrics(component).exposition().decode()
    for metric in metrics_of(component).values():
        assert f"# TYPE {metric.full_name} {metric.kind.value}" in text


def entries_of_one_name() -> Iterator[list[Metric]]:
    by_name: dict[str, list[Metric]] = defaultdict(list)
    for metric in CATALOGUE:
        by_name[metric.name].append(metric)
    yield from by_name.values()


def test_entries_of_one_name_differ_in_label_values_alone() -> None:
    for entries in entries_of_one_name():
        assert len({(m.kind, m.help, m.unit, m.label_names, m.family, m.buckets) for m in entries}) == 1
        components = [component for metric in entries for component in metric.components]
        assert len(components) == len(set(components)), entries[0].name


@pytest.mark.parametrize(
    ("component", "metric", "label", "values"),
    [
        ("capture", "calls", "status", CallStatus),
        ("capture", "calls", "kind", CallKind),
        ("capture", "sessions_opened", "purpose", Purpose),
        ("capture", "sessions_closed", "status", SessionStatus),
        ("capture", "engine_ids", "engine", EngineKind),
        ("capture", "parser_failures", "sign", (EMPTY_ARGUMENTS, NOT_PARSED)),
        ("batcher", "groups_closed", "state", CLOSED),
        (
            "batcher",
            "traces_judged",
            "length",
            [*(f"to_{bound}" for bound in LENGTH_BOUNDS), f"above_{LENGTH_BOUNDS[-1]}"],
        ),
        ("batcher", "tokens_by_staleness", "versions", [*map(str, range(LARGEST_STALENESS + 1)), "more"]),
        ("ledger", "ledger_length_tokens", "length", BUCKETS),
        ("ledger", "ledger_tokens", "fate", fates(Totals())),
    ],
)
def test_known_values_are_those_of_the_code(component: str, metric: str, label: str, values: Iterable[str]) -> None:
    declared = {item.name: item for item in metrics_of(component)[metric].labels}
    assert set(declared[label].values) == set(values)


def test_names_say_their_unit_as_prometheus_wants_it() -> None:
    for metric in CATALOGUE:
        assert metric.full_name.endswith("_seconds") == (metric.unit == "seconds"), metric.name
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket")), metric.name
        assert metric.help.endswith("."), metric.name


def test_every_measurement_in_the_sources_is_in_the_catalogue() -> None:
    names = {metric.name: metric.kind for metric in CATALOGUE}
    kinds = {"count": Kind.COUNTER, "gauge": Kind.GAUGE, "observe": Kind.HISTOGRAM}
    found = set()
    for folder in ("shared", "services"):
        for file in (ROOT / folder).rglob("*.py"):
            for how, name in MEASURES.findall(file.read_text(encoding="utf-8")):
                assert names.get(name) is kinds[how], f"{file}: {name}"
                found.add(name)
    assert len(found) > 40


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("nonsense", {}),
        ("records", {}),
        ("records", {"topic": "built", "session": "s1"}),
        ("groups_closed", {"state": "sulking"}),
        ("lag_records", {"topic": "built", "partition": "0"}),
    ],
)
def test_an_undeclared_name_label_or_kind_is_an_error(name: str, labels: dict[str, str]) -> None:
    with pytest.raises(UndeclaredMetricError, match=name):
        Metrics("batcher").count(name, 1, **labels)


def test_a_service_goes_on_without_an_undeclared_measurement_and_counts_it() -> None:
    metrics = Metrics("batcher", strict=False)
    metrics.count("nonsense")
    metrics.count_all({"cuts": 1, "more_nonsense": 2})
    assert metrics.registry.get_sample_value("rollmill_undeclared_metrics_total") == 2
    assert metrics.registry.get_sample_value("rollmill_stage_events_total", {"event": "cuts"}) == 1


def test_counts_of_a_stage_go_to_the_longest_family_that_fits() -> None:
    metrics = Metrics("batcher")
    metrics.count_all({"traces_to_1024": 3, "traces_stale_to_1024": 2, "excluded_ungraded:no_evaluator": 7, "cuts": 1})
    value = metrics.registry.get_sample_value
    assert value("rollmill_traces_judged_total", {"length": "to_1024"}) == 3
    assert value("rollmill_traces_stale_total", {"length": "to_1024"}) == 2
    assert value("rollmill_tokens_excluded_total", {"reason": "ungraded:no_evaluator"}) == 7


def test_values_that_users_make_up_are_bounded() -> None:
    metrics = Metrics("capture")
    for number in range(3 * MOST_SERIES):
        metrics.count("rewards", evaluator=f"e{number}")
    own = [labels for labels in series(metrics)["rollmill_rewards_total"] if labels["evaluator"] != "other"]
    assert len(own) == MOST_SERIES
    other = metrics.registry.get_sample_value("rollmill_rewards_total", {"evaluator": "other"})
    assert other == 2 * MOST_SERIES


def test_a_partition_that_went_to_another_member_is_no_longer_shown() -> None:
    metrics = Metrics("evaluator")
    for partition in ("0", "1"):
        metrics.gauge("evaluator_lag_records", 5, reads="light", topic="built", partition=partition)
    for _ in range(2):
        metrics.forget("evaluator_lag_records", reads="light", topic="built", partition="0")
    shown = series(metrics)["rollmill_evaluator_lag_records"]
    assert [labels["partition"] for labels in shown] == ["1"]


def test_a_stage_of_somebody_else_has_the_engine_metrics_and_any_event() -> None:
    metrics = Metrics("my-stage")
    metrics.count_all({"words": 2, "dead_letters_conflict": 1})
    assert metrics.registry.get_sample_value("rollmill_stage_events_total", {"event": "words"}) == 2
    assert metrics.registry.get_sample_value("rollmill_dead_letters_total", {"reason": "conflict"}) == 1


def test_the_ledger_shows_every_token_and_forgets_reasons_that_are_gone() -> None:
    metrics, balance = Metrics("ledger"), Balance()
    balance.total.captured, balance.total.trained, balance.total.lost = 10, 4, 1
    balance.total.excluded.update({"odd": 3, "aux": 2})
    export_balance(balance, metrics, at=5.0, seconds=0.1)
    value = metrics.registry.get_sample_value
    assert value("rollmill_ledger_tokens", {"fate": "excluded"}) == 5
    assert value("rollmill_ledger_imbalance_tokens", {"kind": "lost"}) == 1
    assert value("rollmill_ledger_excluded_tokens", {"reason": "odd"}) == 3
    del balance.total.excluded["odd"]
    export_balance(balance, metrics, at=6.0, seconds=0.1)
    assert value("rollmill_ledger_excluded_tokens", {"reason": "odd"}) is None
    assert value("rollmill_ledger_excluded_tokens", {"reason": "stale"}) == 0


@pytest.mark.parametrize("component", COMPONENTS)
def test_promtool_has_nothing_to_say(component: str, promtool: str) -> None:
    done = subprocess.run(
        (promtool, "check", "metrics"), input=Metrics(component).exposition(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
