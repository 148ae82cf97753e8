"""What strategies raise ends their own job: not the process, and not the work of others."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import structlog

from rollmill.codec import decode
from rollmill.errors import InvalidInputError
from rollmill.models import (
    CompletionSession,
    EvalResult,
    EvaluatorSpec,
    SessionClosed,
    SessionOpened,
    SessionSpec,
    SessionStatus,
    StrategySpec,
    Trajectory,
    TrajectoryStatus,
)
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.strategies import (
    BaseGroupScorer,
    BaseIncrementalBuilder,
    BaseTrajectoryBuilder,
    BaseTrajectoryEvaluator,
    EvaluationContext,
    ResourceClass,
    StrategyRegistry,
)
from rollmill.strategies.foreign_code import ForeignExitError, contained, contained_await, describe
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.sessions import completion, user
from rollmill.topics import BUILT, COMPLETIONS
from rollmill_builder.stage import BuilderStage
from rollmill_evaluator.delivery.record_handler import resource_class_of
from rollmill_evaluator.evaluators.composite import CompositeEvaluator
from rollmill_evaluator.grading import EvaluationLimits, Grader

ENDINGS: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(0),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "RecursionError": RecursionError,
    "MemoryError": MemoryError,
    "BaseExceptionGroup": lambda: BaseExceptionGroup("both", [SystemExit(0), ValueError()]),
}
LIMITS = EvaluationLimits(seconds=5.0, attempts=1, retry_seconds=0.0, bytes=2000)

every_ending = pytest.mark.parametrize("ending", ENDINGS)


@pytest.fixture(autouse=True)
def signals_of_a_service() -> Iterator[None]:
    """A service handles SIGINT itself: there, no KeyboardInterrupt comes from outside."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


def end(ending: str) -> Any:
    raise ENDINGS[ending]()  # noqa: RSE102  # some are functions


class Builder(BaseTrajectoryBuilder):
    def __init__(self, at: str, ending: str) -> None:
        self.ending = ending
        if at == "init":
            end(ending)

    def build(self, session: CompletionSession) -> Trajectory:  # noqa: ARG002  # the base's signature
        return end(self.ending)  # type: ignore[no-any-return]  # it never returns


class Incremental(BaseIncrementalBuilder[int]):
    def __init__(self, at: str, ending: str) -> None:
        self.at, self.ending = at, ending

    def start(self) -> int:
        return end(self.ending) if self.at == "start" else 0

    def add(self, state: int, record: Any) -> int:  # noqa: ARG002
        return end(self.ending) if self.at == "add" else state + 1

    def finish(self, state: int, session: CompletionSession) -> Trajectory:  # noqa: ARG002
        return end(self.ending)  # type: ignore[no-any-return]


class Evaluator(BaseTrajectoryEvaluator):
    def __init__(self, at: str, ending: str) -> None:
        self.at, self.ending = at, ending
        if at == "init":
            end(ending)

    @property
    def version(self) -> str:
        return end(self.ending) if self.at == "version" else "1"

    @property
    def resource_class(self) -> ResourceClass:  # type: ignore[override]  # a strategy may compute it
        return end(self.ending) if self.at == "resource_class" else ResourceClass.LIGHT

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:  # noqa: ARG002
        if self.at == "child task":
            await asyncio.gather(*(asyncio.create_task(self._later()) for _ in range(2)))
        if self.at == "thread":
            await asyncio.to_thread(end, self.ending)
        await asyncio.sleep(0)
        if self.at == "evaluate":
            end(self.ending)
        return EvalResult(outcome_reward=1.0)

    async def _later(self) -> None:
        await asyncio.sleep(0)
        end(self.ending)


class NoCoroutine(Evaluator):
    def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> Awaitable[EvalResult]:  # type: ignore[override]  # noqa: ARG002
        return end(self.ending)  # type: ignore[no-any-return]


def evaluators() -> StrategyRegistry[BaseTrajectoryEvaluator]:
    classes: dict[str, type[BaseTrajectoryEvaluator]] = {"foreign": Evaluator, "no_coroutine": NoCoroutine}
    classes["composite"] = CompositeEvaluator
    return StrategyRegistry[BaseTrajectoryEvaluator]("evaluator", BaseTrajectoryEvaluator, classes)  # type: ignore[type-abstract]  # only for subclass checks


def built(strategy: str, at: str, ending: str) -> MemoryTask[Any]:
    classes = {"whole": Builder, "incremental": Incremental}
    registry = StrategyRegistry[BaseTrajectoryBuilder]("builder", BaseTrajectoryBuilder, classes)  # type: ignore[type-abstract]
    task: MemoryTask[Any] = MemoryTask(BuilderStage(registry=registry, partitions=1, late_window=100.0))
    builder = StrategySpec(strategy=strategy, config={"at": at, "ending": ending})
    spec = SessionSpec(builder=builder)
    for event in (
        SessionOpened(session_id="s1", at=0.0, spec=spec),
        completion("c1", [1, 2], [5, 6], at=1.0, messages=[user("?")]),
        SessionClosed(session_id="s1", at=2.0, status=SessionStatus.COMPLETED),
    ):
        task.feed(COMPLETIONS, event, key="s1")
    return task


@every_ending
@pytest.mark.parametrize(
    ("strategy", "at"),
    [("whole", "build"), ("incremental", "start"), ("incremental", "add"), ("incremental", "finish")],
)
def test_f3_a_builder_ends_its_own_session(strategy: str, at: str, ending: str) -> None:
    task = built(strategy, at, ending)
    (record,) = task.of(BUILT)
    assert isinstance(record.value, bytes)
    trajectory: Trajectory = decode(Trajectory, record.value, record.headers)
    assert trajectory.status is TrajectoryStatus.ERROR
    assert ending in (trajectory.error or "")
    assert [(item.reason, item.tokens) for item in trajectory.excluded] == [("builder_error", 2)]


@every_ending
def test_f3_a_builder_that_cannot_be_constructed_is_a_dead_letter(ending: str) -> None:
    task = built("whole", "init", ending)
    assert [error.reason for _, error in task.dead_letters] == ["unknown_strategy"]


@every_ending
@pytest.mark.parametrize("at", ["init", "version", "resource_class", "evaluate", "child task"])
async def test_f3_an_evaluator_ends_its_own_evaluation(at: str, ending: str) -> None:
    spec = EvaluatorSpec(strategy="foreign", config={"at": at, "ending": ending})
    assert resource_class_of(evaluators(), spec) is ResourceClass.LIGHT
    found = await graded(spec)
    if at == "resource_class":
        assert found.outcome_reward == 1.0
    else:
        assert found.not_graded == "evaluator_error"
        assert ending in str(found.metadata["error"])


@every_ending
async def test_f3_a_thread_of_an_evaluator_ends_its_own_evaluation(ending: str) -> None:
    if ending == "CancelledError":
        pytest.skip("a future that is cancelled cancels nothing here")
    assert (await graded(EvaluatorSpec(strategy="foreign", config={"at": "thread", "ending": ending}))).not_graded


@every_ending
async def test_f3_an_evaluator_that_raises_before_it_is_awaited(ending: str) -> None:
    found = await graded(EvaluatorSpec(strategy="no_coroutine", config={"at": "", "ending": ending}))
    assert found.not_graded == "evaluator_error"


@every_ending
async def test_f3_a_part_of_a_composite_is_not_the_end_of_the_others(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill_evaluator.evaluators.composite.evaluator_registry", evaluators)
    parts = [
        {"strategy": "foreign", "name": name, "config": {"at": at, "ending": ending}}
        for name, at in (("bad", "evaluate"), ("good", "never"))
    ]
    spec = EvaluatorSpec(strategy="composite", config={"parts": parts, "not_graded": "skip"})
    assert (await graded(spec)).outcome_reward == 1.0


async def graded(spec: EvaluatorSpec) -> Any:
    trajectory = Trajectory(session_id="s1", status=TrajectoryStatus.COMPLETED)
    return await Grader(evaluators(), LIMITS, ManualClock(1.0)).grade(trajectory, "digest", spec)


async def test_a_cancelled_evaluation_is_cancelled() -> None:
    started = asyncio.Event()

    async def wait() -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(contained_await(wait()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_ctrl_c_passes_where_it_raises() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), contained():
        signal.raise_signal(signal.SIGINT)


def test_errors_pass_as_they_are() -> None:
    with pytest.raises(KeyError), contained():
        raise KeyError("mine")


def test_an_error_whose_text_raises_has_its_type() -> None:
    class Silent(Exception):  # noqa: N818  # a user's
        def __str__(self) -> str:
            raise SystemExit

    assert describe(Silent()) == "Silent: its text cannot be shown"


@every_ending
def test_f3_an_entry_point_that_cannot_be_loaded_is_refused_when_it_is_named(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = evaluators()
    monkeypatch.setattr(EntryPoint, "load", lambda _: end(ending))
    registry.load([EntryPoint("broken", "broken:Broken", "rollmill.evaluators")])
    assert "broken" not in registry.names
    with pytest.raises(InvalidInputError, match=f"'broken' cannot be loaded: .*{ending}"):
        registry.find("broken")


class Scorer(BaseGroupScorer):
    def __init__(self, ending: str) -> None:
        self.ending = ending

    def score(self, members: Sequence[Trajectory]) -> Sequence[float | None]:  # noqa: ARG002
        return end(self.ending)  # type: ignore[no-any-return]


@every_ending
def test_f3_a_group_scorer_never_ends_with_its_own_exit_code(ending: str) -> None:
    from rollmill_batcher.groups.group_scoring import Scoring  # noqa: PLC0415

    class Group:
        group_id = "g"
        current: tuple[Trajectory, ...] = ()

    with structlog.testing.capture_logs() as logs:
        Scoring("mine", Scorer(ending)).score(Group())  # type: ignore[arg-type]  # as much of a group as is read
    assert ending in logs[0]["error"]


async def test_contained_code_raises_foreign_exit_error() -> None:
    async def leave() -> None:
        sys.exit(0)

    with pytest.raises(ForeignExitError, match="SystemExit: 0"):
        await contained_await(leave())
