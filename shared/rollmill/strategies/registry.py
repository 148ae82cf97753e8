"""One generic registry; the default ones read entry points."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from rollmill.errors import InvalidInputError
from rollmill.models import SessionSpec, StrategySpec
from rollmill.models.spec_maxima import SpecMaxima
from rollmill.strategies.bases import (
    BaseAdvantage,
    BaseGroupScorer,
    BaseTrajectoryBuilder,
    BaseTrajectoryEvaluator,
)
from rollmill.strategies.maxima import require_requests_within, require_spec_within

S = TypeVar("S")


class StrategyRegistry(Generic[S]):
    """Names to classes of one kind; ``create`` constructs one from a spec.

    Raises InvalidInputError with the known names for an unknown name, for a class of another kind, and for a
    config that the class does not take.
    """

    def __init__(self, kind: str, base: type[S], classes: Mapping[str, type[S]] | None = None) -> None:
        self._kind = kind
        self._base = base
        self._classes: dict[str, type[S]] = dict(classes or {})

    def register(self, name: str, strategy: type[S]) -> None:
        if name in self._classes and self._classes[name] is not strategy:
            raise ValueError(f"{self._kind} {name!r} is registered already; choose another name")
        self._classes[name] = self._checked(name, strategy)

    @property
    def names(self) -> list[str]:
        return sorted(self._classes)

    def create(self, spec: StrategySpec) -> S:
        """A strategy constructed as ``Class(**spec.config)``."""
        strategy = self.find(spec.strategy)
        try:
            inspect.signature(strategy).bind(**spec.config)
            return strategy(**spec.config)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"{self._kind} {spec.strategy!r} does not take this config: {error}") from error

    def find(self, name: str) -> type[S]:
        if name in self._classes:
            return self._classes[name]
        if ":" not in name:
            raise InvalidInputError(
                f"unknown {self._kind} {name!r}: known are {', '.join(self.names) or 'none'}; "
                "a class of your own is named as module:ClassName"
            )
        strategy = self._imported(name)
        self._classes[name] = strategy
        return strategy

    def _imported(self, path: str) -> type[S]:
        module, _, attribute = path.partition(":")
        try:
            found: Any = getattr(import_module(module), attribute)
        except Exception as error:  # importing foreign code can raise anything
            raise InvalidInputError(f"{self._kind} {path!r} cannot be imported: {error!r}") from error
        return self._checked(path, found)

    def _checked(self, name: str, found: Any) -> type[S]:
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise InvalidInputError(f"{self._kind} {name!r} is no subclass of {self._base.__name__}")
        return found


def _from_entry_points(kind: str, base: type[S], group: str) -> StrategyRegistry[S]:
    classes = {point.name: point.load() for point in entry_points(group=group)}
    return StrategyRegistry(kind, base, classes)


@cache
def builder_registry() -> StrategyRegistry[BaseTrajectoryBuilder]:
    return _from_entry_points("builder", BaseTrajectoryBuilder, "rollmill.builders")  # type: ignore[type-abstract]  # only for subclass checks


@cache
def evaluator_registry() -> StrategyRegistry[BaseTrajectoryEvaluator]:
    return _from_entry_points("evaluator", BaseTrajectoryEvaluator, "rollmill.evaluators")  # type: ignore[type-abstract]  # only for subclass checks


@cache
def advantage_registry() -> StrategyRegistry[BaseAdvantage]:
    return _from_entry_points("advantage", BaseAdvantage, "rollmill.advantages")  # type: ignore[type-abstract]  # only for subclass checks


@cache
def group_scorer_registry() -> StrategyRegistry[BaseGroupScorer]:
    return _from_entry_points("group scorer", BaseGroupScorer, "rollmill.group_scorers")  # type: ignore[type-abstract]  # only for subclass checks


def validate_session_spec(spec: SessionSpec, maxima: SpecMaxima | None = None) -> None:
    """Refuse unknown strategies and bad configs when a session opens, not after the rollout; and what asks for more
    than ``maxima``. None: nothing is too much.

    Raises InvalidInputError.
    """
    if maxima is not None:
        require_spec_within(spec, maxima)  # first: constructing strategies from such a spec may take for ever
    builder_registry().create(spec.builder)
    for index, evaluator in enumerate(spec.evaluators):
        requests = evaluator_registry().create(evaluator).requested_resources()
        if maxima is not None:
            require_requests_within(requests, maxima, f"evaluators.{index}.config.")
