"""Settings of the batcher: one table of defaults, checked against each other at the start."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from rollmill.errors import ConfigurationError
from rollmill.topics import ACKS, POLICIES, STATE_BATCHER, TRAJECTORIES
from rollmill_batcher.app import build
from rollmill_batcher.groups.eligibility import SamplePolicy, Treatment
from rollmill_batcher.groups.staleness import Staleness
from rollmill_batcher.settings import BatcherSettings
from rollmill_batcher.steps.advantages import Grpo, NoAdvantage


def settings(**values: Any) -> BatcherSettings:
    return BatcherSettings(**values)


def test_the_defaults_are_consistent_and_those_of_the_table() -> None:
    config = settings().batcher_config()
    assert isinstance(config.learning.advantage, Grpo)
    assert (config.staleness, config.sample_policy, config.steps_ahead) == (Staleness(4), SamplePolicy(), 1)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"MAX_STALENESS": "none", "ADVANTAGE_CONFIG": '{"scale": "batch"}', "ON_TIMEOUT": "train", "SEED": "7"}
    for name, value in values.items():
        monkeypatch.setenv(f"ROLLMILL_{name}", value)
    config = settings().batcher_config()
    assert (config.staleness.limit, config.sample_policy.timeout, config.seed) == (None, Treatment.TRAIN, 7)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"group_deadline_seconds": 100.0}, "must be above evaluation_seconds"),
        ({"late_window_seconds": 100.0}, "must not be below group_deadline_seconds"),
        ({"group_deadline_seconds": 7e5, "late_window_seconds": 7e5}, "must be below the retention"),
        ({"world_size": 9}, "needs as many partitions"),
        ({"max_staleness": -1}, "greater than or equal to 0"),
        ({"on_error": "ignore"}, "'train', 'count' or 'exclude'"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(complaint)):
        settings(**values)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"min_k": 1}, "would only make zeros"),
        ({"advantage": "gae"}, "unknown advantage"),
        ({"advantage_config": {"scale": "median"}}, "does not take this config"),
    ],
)
def test_a_strategy_that_cannot_work_is_refused_at_the_start(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        settings(**values).batcher_config()


def test_single_rollouts_are_fine_where_nothing_is_compared() -> None:
    assert isinstance(settings(min_k=1, advantage="none").batcher_config().learning.advantage, NoAdvantage)


def test_the_service_is_one_stage_over_three_inputs() -> None:
    service = build(settings())
    (stage,) = service.stages
    assert (service.name, stage.inputs, stage.state_topic) == (
        "batcher",
        (TRAJECTORIES, POLICIES, ACKS),
        STATE_BATCHER,
    )
