"""No call changes a stage: what it remembers is in the state, or in the task-local that the engine gives it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollmill.models import Evaluation, EvaluatorSpec, PolicyAnnouncement, PolicyVersion, SessionSpec, StrategySpec
from rollmill.runtime.stream import Processor
from rollmill.strategies import builder_registry
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import Reply, sample_trace, sample_trajectory
from rollmill.testing.simulation import deliver
from rollmill.testing.simulation.strategies import examples, worlds
from rollmill.topics import BUILT, COMPLETIONS, EVALUATIONS, POLICIES, TRAJECTORIES
from rollmill_batcher.groups.config import BatcherConfig, GroupRules, Learning
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.steps.advantages import Grpo
from rollmill_builder.sessions.task_resources import MemoryLimits
from rollmill_builder.stage import BuilderStage
from rollmill_reward_merger.stage import RewardMergerStage
from rollmill_reward_merger.timers import Windows

TASKS = 2
TRIES = examples(60, share=5)


def frozen(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """Everything that is reached from ``value``: containers and attributes by content, and which objects those are."""
    if id(value) in seen or isinstance(value, (type, str, bytes, int, float, type(None))):
        return value
    seen |= {id(value)}
    if isinstance(value, dict):
        return [id(value), *((key, frozen(item, seen)) for key, item in value.items())]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [id(value), *(frozen(item, seen) for item in value)]
    attributes = {name: getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    return [id(value), *((name, frozen(item, seen)) for name, item in attributes.items())]


class Tasks:
    """Several tasks of one stage, as in one process; the stage is compared before and after each call."""

    def __init__(self, stage: Processor[Any, Any]) -> None:
        self._stage = stage
        self._before = frozen(vars(stage))
        self.tasks = [MemoryTask(stage, partition=number) for number in range(TASKS)]

    def feed(self, topic: Any, events: Iterable[Any]) -> None:
        for event in events:
            for task in self.tasks:
                task.feed(topic, event, key=getattr(event, "session_id", ""), partition=0)
                self.check()

    def punctuate(self, *times: float) -> None:
        for now in times:
            for task in self.tasks:
                task.punctuate(now)
                task.stage.gauges(task.state, task.local)
                self.check()

    def check(self) -> None:
        assert frozen(vars(self._stage)) == self._before


def test_a_change_is_seen() -> None:
    stage = RewardMergerStage(partitions=1, windows=Windows(1.0, 1.0, 1.0))
    for name in ("_partitions", "_kept"):
        before = frozen(vars(stage))
        setattr(stage, name, {})
        assert frozen(vars(stage)) != before
    before = frozen(vars(stage))
    vars(stage)["_kept"]["x"] = 1
    assert frozen(vars(stage)) != before


@TRIES
@given(st.lists(worlds(most=5, session_id="s0"), min_size=1, max_size=1), st.randoms(use_true_random=True))
def test_the_builder(sessions: list[Any], random: Any) -> None:
    memory = MemoryLimits(memory_bytes=30_000)
    tasks = Tasks(BuilderStage(registry=builder_registry(), partitions=1, late_window=100.0, memory=memory))
    events = deliver(sessions, StrategySpec(strategy="prefix_merging"), random).events
    tasks.feed(COMPLETIONS, events[: len(events) // 2])
    tasks.punctuate(1e6, 1e6 + 50.0)
    tasks.feed(COMPLETIONS, events[len(events) // 2 :])
    tasks.punctuate(2e6)


REWARDS = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0])), min_size=1, max_size=4)


@given(REWARDS, st.lists(st.floats(0.0, 10_000.0), max_size=4))
def test_the_reward_merger(rewards: list[float | None], times: list[float]) -> None:
    tasks = Tasks(RewardMergerStage(partitions=1, windows=Windows(600.0, 600.0, 600.0)))
    spec = SessionSpec(evaluators=(EvaluatorSpec(strategy="judge"),))
    traces = (sample_trace("s1", (Reply((5, 6)),)),)
    evaluations = [
        Evaluation(evaluation_id=f"e{number}", session_id="s1", evaluator="judge", outcome_reward=reward)
        for number, reward in enumerate(rewards)
    ]
    tasks.feed(EVALUATIONS, evaluations[:1])
    tasks.punctuate(*times)
    tasks.feed(BUILT, [sample_trajectory("s1", None, traces=traces).replace(spec=spec)])
    tasks.feed(EVALUATIONS, evaluations[1:])
    tasks.punctuate(*times, 1e6)


@given(REWARDS, st.lists(st.booleans(), max_size=4))
def test_the_batcher(rewards: list[float | None], caught_up: list[bool]) -> None:
    config = BatcherConfig(
        run="r", policy="policy", learning=Learning("grpo", Grpo()), groups=GroupRules(deadline_seconds=60.0)
    )
    tasks = Tasks(BatcherStage(config))
    for number, reward in enumerate(rewards):
        tasks.feed(TRAJECTORIES, [sample_trajectory(f"s{number}", reward, group=f"g{number % 2}", size=2)])
        tasks.punctuate(*(200.0 + number for _ in caught_up))
    tasks.feed(POLICIES, [PolicyAnnouncement(version=PolicyVersion(0, 1), at=1.0)])
    tasks.punctuate(1e6)
