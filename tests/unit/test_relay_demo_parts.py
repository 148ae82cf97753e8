import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from relay.admission import Admission
from relay.agents import Transcript, Turn
from relay.evaluator import RelayEvaluator
from relay.report import Report, failures, last_mean, summary
from relay.task import encode
from rollmill.errors import InvalidInputError
from rollmill.models import StrategySpec, Trace, TraceTurn, Trajectory, TrajectoryStatus
from rollmill.strategies import EvaluationContext, evaluator_registry
from rollmill.strategies.allow_list import SETTING

GOOD = Report(
    reward_first=0.2,
    reward_last=0.9,
    steps=40,
    policy_version=40,
    sessions=100,
    calls=300,
    calls_per_second=100.0,
    seconds=80.0,
    seconds_in_all=90.0,
    tokens_read=600,
    tokens_captured=600,
    tokens_trained=500,
    tokens_excluded={"stale": 60, "late": 10},
    tokens_dead_lettered=20,
    tokens_pending=10,
    tokens_lost=0,
    tokens_doubled=0,
    tokens_uncaptured=0,
    stale_trajectories=10,
    agent_errors=0,
    restarts=0,
    logprob_gap_max=1e-6,
    logprob_gap_tokens=500,
    oracle_mismatches=0,
    oracle_mismatches_by_kind={},
    seed=0,
    layout="packed",
    ranks=1,
    sabotage="none",
)


def trajectory(*replies: str) -> Trajectory:
    """A trace whose replies follow one character of context each, then the end of a turn."""
    pieces = [("a", False)] + [piece for reply in replies for piece in ((reply + ".", True), ("a", False))]
    ids: list[int] = []
    turns: list[TraceTurn] = []
    for text, sampled in pieces[1:]:
        if sampled:
            turns.append(TraceTurn(completion_id=f"c{len(turns)}", start=len(ids), stop=len(ids) + len(text)))
        ids += encode(text)
    count = len(ids)
    mask = np.zeros(count, np.uint8)
    for turn in turns:
        mask[turn.start : turn.stop] = 1
    trace = Trace(
        prompt_ids=np.array(encode("a"), np.int32),
        response_ids=np.array(ids, np.int32),
        loss_mask=mask,
        response_logprobs=np.zeros(count, np.float32),
        turns=tuple(turns),
    )
    return Trajectory(session_id="s", status=TrajectoryStatus.COMPLETED, traces=(trace,) if replies else ())


@pytest.mark.parametrize(
    ("replies", "wanted"), [(("1", "2", "3"), 1.0), (("1", "3", "3"), 2 / 3), (("1",), 1 / 3), (("12", "", "u"), 0.0)]
)
async def test_the_reward_is_the_share_of_right_turns(
    replies: Sequence[str], wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, "relay.evaluator")
    grader = evaluator_registry().create(
        StrategySpec(strategy="relay.evaluator:RelayEvaluator", config={"digits": "123"})
    )
    result = await grader.evaluate(trajectory(*replies), EvaluationContext(10.0))
    assert result.outcome_reward == pytest.approx(wanted)


async def test_a_session_without_a_turn_is_not_graded() -> None:
    result = await RelayEvaluator("123").evaluate(trajectory(), EvaluationContext(10.0))
    assert (result.outcome_reward, result.not_graded) == (None, "no_turns")


async def test_swapped_rewards_are_turned_round() -> None:
    result = await RelayEvaluator("123", "swap_rewards").evaluate(trajectory("1", "2", "4"), EvaluationContext(10.0))
    assert result.outcome_reward == pytest.approx(1 / 3)


def test_a_config_without_digits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "relay.evaluator")
    with pytest.raises(InvalidInputError, match="digits"):
        evaluator_registry().create(
            StrategySpec(strategy="relay.evaluator:RelayEvaluator", config={"digits": "one two"})
        )


def test_a_good_report_has_no_failures() -> None:
    assert failures(GOOD, min_rise=0.4) == []
    assert "600 captured = 500 trained" in summary(GOOD)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokens_lost": 1}, "tokens_lost"),
        ({"tokens_doubled": 1}, "tokens_doubled"),
        ({"tokens_uncaptured": 1}, "tokens_uncaptured"),
        ({"tokens_pending": 9}, "balance"),
        ({"tokens_read": 601}, "tokens_read"),
        ({"logprob_gap_max": 1e-3}, "logprob_gap_max"),
        ({"logprob_gap_max": float("nan")}, "logprob_gap_max"),
        ({"logprob_gap_tokens": 499}, "logprob_gap_tokens"),
        ({"oracle_mismatches": 1, "oracle_mismatches_by_kind": {"ids": 1}}, "oracle_mismatches"),
        ({"reward_last": 0.59}, "reward_rise"),
        ({"reward_first": None, "reward_last": None}, "reward_rise"),
        ({"stale_trajectories": 0}, "stale"),
        ({"tokens_trained": 0, "logprob_gap_tokens": 0, "tokens_captured": 100, "tokens_read": 100}, "trained"),
    ],
)
def test_each_check_is_named_alone(changes: dict[str, object], named: str) -> None:
    found = failures(replace(GOOD, **changes), min_rise=0.4)  # type: ignore[arg-type]  # one dictionary for all fields
    assert [failure.split(":")[0] for failure in found] == [named]


def test_no_rise_is_asked_where_none_is_wanted() -> None:
    assert failures(replace(GOOD, reward_last=0.1), min_rise=0) == []


def test_a_failed_call_leaves_open_what_was_read() -> None:
    assert failures(replace(GOOD, tokens_read=598, agent_errors=1), min_rise=0.4) == []


def test_the_last_mean_is_of_five() -> None:
    assert last_mean([0.0, 1.0, 1.0, 1.0, 1.0, 0.5]) == pytest.approx(0.9)
    assert last_mean([]) is None


def ended(admission: Admission, group: int, *, silent: bool = False) -> None:
    turns = () if silent else (Turn("?1", "1", "stop", right=True),)
    for member in range(2):
        admission.ended(Transcript(f"s{group}-{member}", group, member, "1", turns))


def settle(admission: Admission, group: int) -> None:
    for member in range(2):
        admission.settled(f"s{group}-{member}")


async def waits(admission: Admission, group: int) -> bool:
    """Whether the group may not start yet; where it may, it has."""
    asked = asyncio.create_task(admission.admit(group))
    for _ in range(3):
        await asyncio.sleep(0)
    if asked.done():
        return False
    asked.cancel()
    return True


async def test_groups_wait_for_agents_and_then_for_settled_groups() -> None:
    admission = Admission(limit=3, at_once=2, group_size=2)
    assert not await waits(admission, 0)
    assert not await waits(admission, 1)
    assert await waits(admission, 2)
    ended(admission, 0)
    assert not await waits(admission, 2)
    ended(admission, 1)
    ended(admission, 2)
    assert await waits(admission, 3)
    settle(admission, 1)
    assert not await waits(admission, 3)


async def test_slow_groups_come_on_top() -> None:
    admission = Admission(limit=1, at_once=1, group_size=2)
    assert not await waits(admission, 0)
    assert not await waits(admission, 6)
    assert await waits(admission, 7)


async def test_a_group_that_said_nothing_holds_no_place() -> None:
    admission = Admission(limit=1, at_once=1, group_size=2)
    assert not await waits(admission, 0)
    ended(admission, 0, silent=True)
    assert not await waits(admission, 1)


async def test_a_waiting_group_starts_when_there_is_room() -> None:
    admission = Admission(limit=1, at_once=1, group_size=2)
    await admission.admit(0)
    waiting = asyncio.create_task(admission.admit(1))
    await asyncio.sleep(0)
    ended(admission, 0)
    settle(admission, 0)
    settle(admission, 0)
    await asyncio.wait_for(waiting, 5)
