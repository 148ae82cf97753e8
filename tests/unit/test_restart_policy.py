from __future__ import annotations

import pytest

from rollmill.errors import EXIT_DRAINED, EXIT_FATAL, EXIT_FENCED, ConfigurationError
from rollmill.runtime.supervisor import DRAIN_ORDER, RestartPolicy, service_program
from rollmill.runtime.supervisor.restart_policy import NextStep, RestartDecision

SIGKILLED = -9


def test_exit_codes_decide() -> None:
    policy = RestartPolicy()
    assert policy.after(EXIT_DRAINED, failures=1) == RestartDecision(NextStep.STOP)
    assert policy.after(EXIT_FATAL, failures=1) == RestartDecision(NextStep.FATAL_EXIT)
    assert policy.after(EXIT_FENCED, failures=1) == RestartDecision(NextStep.RESTART, 30.0)


def test_f3_an_end_without_a_stop_request_is_a_crash_whatever_its_exit_code() -> None:
    policy = RestartPolicy()
    assert policy.after(EXIT_DRAINED, failures=2, stop_requested=False) == policy.after(SIGKILLED, failures=2)
    assert policy.after(EXIT_FATAL, failures=1, stop_requested=False) == RestartDecision(NextStep.FATAL_EXIT)


@pytest.mark.parametrize(("failures", "pause"), [(1, 0.5), (2, 1.0), (3, 2.0), (10, 30.0), (10_000, 30.0)])
def test_crashes_back_off(failures: int, pause: float) -> None:
    assert RestartPolicy().after(SIGKILLED, failures=failures) == RestartDecision(NextStep.RESTART, pause)
    assert RestartPolicy().after(1, failures=failures) == RestartDecision(NextStep.RESTART, pause)


def test_services_have_their_modules() -> None:
    assert [service_program(name, {}).module for name in DRAIN_ORDER] == [
        "rollmill_capture",
        "rollmill_builder",
        "rollmill_evaluator",
        "rollmill_reward_merger",
        "rollmill_batcher",
    ]
    with pytest.raises(ConfigurationError, match="known are capture"):
        service_program("grader", {})
