"""Whatever the interleaving of its two inputs, the reward-merger emits the same revisions in the same order."""

from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from rollmill.codec import decode
from rollmill.models import Evaluation, EvaluatorSpec, Record, RewardRule, SessionSpec, SessionStatus, Trajectory
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.trajectories import Reply, sample_trace
from rollmill.topics import BUILT, EVALUATIONS, TRAJECTORIES, Topic
from rollmill_reward_merger.merging import merge
from rollmill_reward_merger.stage import RewardMergerStage
from rollmill_reward_merger.state import StateValue
from rollmill_reward_merger.timers import Due, Timer, Windows

SESSIONS = ("s1", "s2")
WINDOWS = Windows(revisions=600.0, markers=3600.0, orphans=7200.0)
Step = tuple[Topic, Record]


@dataclass(frozen=True)
class Log:
    """The records of the two input partitions, in their order."""

    built: list[Trajectory]
    evaluations: list[Evaluation]


def trajectory(session_id: str, evaluators: list[str], rule: RewardRule) -> Trajectory:
    spec = SessionSpec(evaluators=tuple(EvaluatorSpec(strategy=name) for name in evaluators), reward_rule=rule)
    traces = (sample_trace(session_id, (Reply((5, 6), then=(9,)), Reply((7,)))), sample_trace(session_id, (), index=1))
    return Trajectory(session_id=session_id, status=SessionStatus.COMPLETED, spec=spec, traces=traces, closed_at=5.0)


@st.composite
def evaluations(draw: st.DrawFn, session_id: str) -> Evaluation:
    timer = draw(st.sampled_from([None, None, None, None, Timer.DEADLINE, Timer.REVISIONS_CLOSED]))
    if timer is not None:
        return Due(timer, f"{session_id}:1", b"", 9.0).record()
    number = draw(st.integers(0, 4))
    return Evaluation(
        evaluation_id=f"e{number}",
        session_id=session_id,
        evaluator=draw(st.sampled_from(["judge", "tests", "human"])),
        supersedes=draw(st.sampled_from([None, "e0", "e1"])) if number > 1 else None,
        outcome_reward=draw(st.sampled_from([None, 0.0, 0.5])),
        trace_rewards=draw(st.sampled_from([None, None, (1.0, None), (1.0,)])),
        turn_rewards=draw(st.sampled_from([None, None, ((0.1, None), None), ((0.1,), None)])),
        repeatable=draw(st.booleans()),
    )


@st.composite
def logs(draw: st.DrawFn) -> Log:
    built = [
        trajectory(
            name, draw(st.lists(st.sampled_from(["judge", "tests"]), unique=True)), draw(st.sampled_from(RewardRule))
        )
        for name in draw(st.permutations(SESSIONS))
    ]
    given = draw(st.lists(st.sampled_from(SESSIONS).flatmap(evaluations), max_size=10))
    return Log(built, given)


def interleaved(log: Log, built_first: list[bool]) -> list[Step]:
    built: list[Step] = [(BUILT, record) for record in log.built]
    evaluated: list[Step] = [(EVALUATIONS, record) for record in log.evaluations]
    steps: list[Step] = []
    for choice in built_first:
        queue = built if choice else evaluated
        if queue:
            steps.append(queue.pop(0))
    return [*steps, *built, *evaluated]


def run(steps: list[Step]) -> MemoryTask[StateValue]:
    task = MemoryTask(RewardMergerStage(partitions=1, windows=WINDOWS))
    for topic, record in steps:
        task.feed(topic, record)
    return task


def emitted(task: MemoryTask[StateValue]) -> dict[str, list[object]]:
    return {name: [emit.value for emit in task.of(TRAJECTORIES) if emit.key == name] for name in SESSIONS}


def refused(task: MemoryTask[StateValue]) -> list[tuple[int, str]]:
    return sorted((record.offset, error.reason) for record, error in task.dead_letters)


@given(logs(), st.lists(st.booleans(), max_size=12))
def test_revisions_do_not_depend_on_the_interleaving(log: Log, order: list[bool]) -> None:
    one, other = run(interleaved(log, [])), run(interleaved(log, order))
    last = run(interleaved(log, [False] * len(log.evaluations)))
    assert emitted(one) == emitted(other) == emitted(last)
    assert refused(one) == refused(other) == refused(last)


@given(logs(), st.lists(st.booleans(), max_size=12))
def test_restored_state_is_live_state_at_every_step(log: Log, order: list[bool]) -> None:
    task = MemoryTask(RewardMergerStage(partitions=1, windows=WINDOWS))
    for topic, record in interleaved(log, order):
        task.feed(topic, record)
        assert dict(task.restored().items()) == dict(task.state.items())


@given(logs(), st.lists(st.booleans(), max_size=12), st.integers(0, 11))
def test_a_restart_in_the_middle_changes_nothing(log: Log, order: list[bool], crash: int) -> None:
    steps = interleaved(log, order)
    whole, task = run(steps), run(steps[:crash])
    task.restart()
    for topic, record in steps[crash:]:
        task.feed(topic, record)
    assert emitted(task) == emitted(whole)


@given(logs())
def test_revisions_are_numbered_from_0_without_gaps(log: Log) -> None:
    for values in emitted(run(interleaved(log, []))).values():
        numbers = [_revision(value) for value in values]
        assert numbers == list(range(len(numbers)))


NUMBERS = st.floats(-1e30, 1e30)


@given(
    st.sampled_from([rule for rule in RewardRule if rule is not RewardRule.LAST]),
    st.lists(st.tuples(NUMBERS, st.none() | NUMBERS, st.floats(0, 1e6)), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_the_reward_does_not_depend_on_who_spoke_first(
    rule: RewardRule, grades: list[tuple[float, float | None, float]], random: Random
) -> None:
    names = [f"judge-{number}" for number in range(len(grades))]
    specs = tuple(
        EvaluatorSpec(strategy="judge", name=name, weight=grade[2]) for name, grade in zip(names, grades, strict=True)
    )
    built = trajectory("s1", [], rule).replace(spec=SessionSpec(evaluators=specs, reward_rule=rule))
    evaluated = [
        Evaluation(
            evaluation_id=f"of-{name}",
            session_id="s1",
            evaluator=name,
            outcome_reward=outcome,
            turn_rewards=None if turn is None else ((turn, None), None),
        )
        for name, (outcome, turn, _) in zip(names, grades, strict=True)
    ]
    one = merge(built, evaluated)
    random.shuffle(evaluated)
    assert one.traces == merge(built, evaluated).traces


def _revision(value: object) -> int | None:
    assert isinstance(value, bytes)
    merged: Trajectory = decode(Trajectory, value)
    return merged.revision
