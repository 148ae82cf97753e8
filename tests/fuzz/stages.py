"""Stages under mutated records: a short stream of right records, broken ones among them, then the end of everything.

Each run returns its faults: what a stage raised beside PoisonRecordError, outputs that their readers refuse, a state
that cannot be restored, and sessions or groups that did not end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rollmill.codec import Headers
from rollmill.models import (
    Evaluation,
    EvaluatorSpec,
    PolicyAnnouncement,
    PolicyVersion,
    Record,
    SessionClosed,
    SessionSpec,
    StepAcknowledged,
    StrategySpec,
)
from rollmill.runtime.stream import Processor
from rollmill.strategies import builder_registry
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import sample_trajectory
from rollmill.testing.simulation import deliver
from rollmill.topics import ACKS, BATCHES, BUILT, COMPLETIONS, EVALUATIONS, POLICIES, TRAJECTORIES, Topic
from rollmill_batcher.groups.config import BatcherConfig, GroupRules, Learning
from rollmill_batcher.groups.group import RolloutGroup
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.steps.advantages import Grpo
from rollmill_builder.sessions.session_state import OpenSession
from rollmill_builder.stage import BuilderStage
from rollmill_reward_merger.stage import RewardMergerStage
from rollmill_reward_merger.state import Built
from rollmill_reward_merger.timers import Windows
from tests.fuzz.mutation import Mutator
from tests.fuzz.records import fault_of, mutated, session_of_bytes, some_world, unreadable_outputs

ROUNDS = 8
LATER = 10**6
Stream = list[tuple[Topic, Record]]


class StageRun:
    """One task in memory. After the first fault it does nothing more: what follows would be its consequence."""

    def __init__(self, stage: Processor[Any, Any]) -> None:
        self.task: MemoryTask[Any] = MemoryTask(stage)
        self.faults: list[str] = []

    def feed(self, topic: Topic, value: Record | bytes, headers: Headers = (), key: str | None = None) -> None:
        name = key if key is not None else str(getattr(value, "session_id", ""))
        self._run(lambda: self.task.feed(topic, value, key=name, headers=headers))

    def feed_stream(self, stream: Stream, mutator: Mutator) -> None:
        """The records in order, each with up to two mutations of it before or in place of it."""
        for topic, record in stream:
            for _ in range(mutator.rng.choice((0, 0, 1, 2))):
                value, headers = mutated(record, mutator)
                self.feed(topic, value, headers, session_of_bytes(value, headers, topic))
            if mutator.chance(0.8):
                self.feed(topic, record)

    def pass_time(self, topic: Topic | None = None) -> Iterator[int]:
        """Rounds of punctuation, ever later; what the stage wrote to ``topic``, its own input, is read back."""
        for number in range(1, ROUNDS + 1):
            sent = len(self.task.emitted)
            self._run(lambda number=number: self.task.punctuate(2e9 + LATER**number))  # type: ignore[misc]  # a default
            for record in self.task.emitted[sent:]:
                if record.topic is topic and record.value is not None:
                    self.feed(record.topic, record.value, record.headers, record.key)
            yield number

    def check(self) -> None:
        """What was written can be read, by readers of the outputs and by the task's next owner."""
        self._run(self.task.restored)
        self.faults += unreadable_outputs(self.task.emitted) if not self.faults else []

    def waiting(self, kind: type) -> list[str]:
        return [key for key, value in self.task.state.items() if isinstance(value, kind)]

    def ended(self, kind: type) -> None:
        left = self.waiting(kind)
        self.faults += [f"{kind.__name__} did not end: {left[:3]}"] if left and not self.faults else []

    def _run(self, work: Callable[[], object]) -> None:
        fault = fault_of(work) if not self.faults else None
        self.faults += [] if fault is None else [fault]


def run_builder(mutator: Mutator) -> list[str]:
    """Sessions of simulated agents; what is open in the end is closed by its agent."""
    rng = mutator.rng
    stage = BuilderStage(registry=builder_registry(), partitions=1, late_window=100.0)
    run, strategy = StageRun(stage), StrategySpec(strategy=rng.choice(("prefix_merging", "per_request")))
    events = deliver([some_world(rng, f"s{number}") for number in (1, 2)], strategy, rng).events
    run.feed_stream([(COMPLETIONS, event) for event in events], mutator)
    run.check()
    if mutator.chance(0.5):
        list(run.pass_time(COMPLETIONS))
    for key in run.waiting(OpenSession):
        session: Any = run.task.state.get(key)
        run.feed(COMPLETIONS, SessionClosed(session_id=session.session_id, attempt=session.attempt, at=2e9))
    run.ended(OpenSession)
    run.check()
    return run.faults


def run_merger(mutator: Mutator) -> list[str]:
    """Trajectories and evaluations; in the end the timers close what waits."""
    run = StageRun(RewardMergerStage(partitions=1, windows=Windows(600.0, 3600.0, 7200.0)))
    spec = SessionSpec(evaluators=(EvaluatorSpec(strategy="judge"), EvaluatorSpec(strategy="human")))
    stream: Stream = []
    for session_id in ("s1", "s2"):
        stream.append((BUILT, sample_trajectory(session_id, None, revision=None).replace(spec=spec)))
        for number, name in enumerate(("judge", "human", "judge")):
            evaluation = Evaluation(
                evaluation_id=f"e{number}", session_id=session_id, evaluator=name, outcome_reward=0.5, at=101.0
            )
            stream.append((EVALUATIONS, evaluation))
    mutator.rng.shuffle(stream)
    run.feed_stream(stream, mutator)
    run.check()
    list(run.pass_time(EVALUATIONS))
    run.ended(Built)
    run.check()
    return run.faults


def run_batcher(mutator: Mutator) -> list[str]:
    """Groups, policy versions and acknowledgements; in the end every step is acknowledged, and deadlines pass."""
    learning, rules = Learning("grpo", Grpo()), GroupRules(deadline_seconds=60.0)
    run = StageRun(BatcherStage(BatcherConfig("run", "policy", learning, rules, groups_per_step=1)))
    stream: Stream = [(POLICIES, PolicyAnnouncement(version=PolicyVersion(0, number), at=1.0)) for number in (1, 2)]
    stream += [(TRAJECTORIES, sample_trajectory(f"s{n}", n % 3 / 2, group=f"g{n % 2}", size=3)) for n in range(6)]
    stream.append((ACKS, _acknowledged(0)))
    mutator.rng.shuffle(stream)
    run.feed_stream(stream, mutator)
    run.check()
    for _ in run.pass_time():
        for step in range(len(run.task.of(BATCHES))):
            run.feed(ACKS, _acknowledged(step))
    run.ended(RolloutGroup)
    run.check()
    return run.faults


def _acknowledged(step: int) -> StepAcknowledged:
    return StepAcknowledged(run="run", rank=0, world_size=1, step=step, batch_id="b", at=1.0)


STAGES: dict[str, Callable[[Mutator], list[str]]] = {
    "builder": run_builder,
    "reward-merger": run_merger,
    "batcher": run_batcher,
}
