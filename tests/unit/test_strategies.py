"""The registry: names, import paths, and refusals that say what to do."""

from __future__ import annotations

import pytest

from rollmill.errors import InvalidInputError
from rollmill.models import EvalResult, StrategySpec, Trajectory
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext, StrategyRegistry
from rollmill.strategies.allow_list import SETTING


class Constant(BaseTrajectoryEvaluator):
    def __init__(self, reward: float = 1.0) -> None:
        if reward < 0:
            raise ValueError("reward must not be negative")
        self.reward = reward

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:  # noqa: ARG002
        return EvalResult(outcome_reward=self.reward)


@pytest.fixture
def registry() -> StrategyRegistry[BaseTrajectoryEvaluator]:
    made: StrategyRegistry[BaseTrajectoryEvaluator] = StrategyRegistry("evaluator", BaseTrajectoryEvaluator)  # type: ignore[type-abstract]  # only for subclass checks
    made.register("constant", Constant)
    return made


def spec(strategy: str, **config: object) -> StrategySpec:
    return StrategySpec(strategy=strategy, config=config)


def test_a_name_constructs_its_class_with_the_config(registry: StrategyRegistry[BaseTrajectoryEvaluator]) -> None:
    made = registry.create(spec("constant", reward=0.5))
    assert isinstance(made, Constant)
    assert made.reward == 0.5
    assert registry.create(spec("constant")) is not registry.create(spec("constant"))


def test_an_import_path_of_a_listed_package_needs_no_registration(
    registry: StrategyRegistry[BaseTrajectoryEvaluator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, "rollmill_evaluator.evaluators")
    path = "rollmill_evaluator.evaluators.session_completed:SessionCompletedEvaluator"
    assert type(registry.create(spec(path))).__name__ == "SessionCompletedEvaluator"


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (spec("constnat"), "known are constant"),
        (spec("no.such.module:Class"), "cannot be imported"),
        (spec("rollmill.models:NoSuchClass"), "cannot be imported"),
        (spec("rollmill.models:Trajectory"), "no subclass of BaseTrajectoryEvaluator"),
        (spec("rollmill.models:dump_json"), "no subclass"),
        (spec("constant", rewrad=1), "rewrad"),
        (spec("constant", reward=-1), "must not be negative"),
    ],
)
def test_refusals_name_the_mistake(
    registry: StrategyRegistry[BaseTrajectoryEvaluator],
    bad: StrategySpec,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SETTING, "no, rollmill.models")
    with pytest.raises(InvalidInputError, match=complaint):
        registry.create(bad)


def test_a_taken_name_is_not_taken_over(registry: StrategyRegistry[BaseTrajectoryEvaluator]) -> None:
    class Other(Constant):
        pass

    with pytest.raises(ValueError, match="choose another name"):
        registry.register("constant", Other)
