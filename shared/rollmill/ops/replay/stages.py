"""The services' stages and settings, found by entry points: this library imports no service.

Group ``rollmill.stages``: by service (builder, reward-merger, batcher) its ``build(settings) -> Service``. Group
``rollmill.graders``: by service (evaluator) a ``replay_grader(settings) -> ReplayGrader``. The annotation of the
parameter ``settings`` is the service's class of settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol

from rollmill.errors import ConfigurationError, InvalidInputError
from rollmill.models import Evaluation, EvaluatorSpec, Trajectory
from rollmill.runtime.stream.processor import Processor
from rollmill.settings import KafkaSettings, ServiceSettings, load
from rollmill.settings.programs import program_settings

STAGES = "rollmill.stages"
GRADERS = "rollmill.graders"

NO_LIMIT = 2**31 - 1
"""A replay meets the live run's unreadable records again, all of them at once."""


class ReplayGrader(Protocol):
    """The evaluator's own way of running strategies under a deadline."""

    @property
    def concurrency(self) -> int:
        """Evaluations that may run at once."""
        ...

    async def grade(self, trajectory: Trajectory, digest: str, spec: EvaluatorSpec) -> Evaluation:
        """The evaluation of ``trajectory``; ``digest`` is that of its record on ``built``."""
        ...

    def encode(self, evaluation: Evaluation, limit: int) -> bytes:
        """The value of a record on ``evaluations``, in at most ``limit`` bytes."""
        ...


def settings_of(service: str, into: KafkaSettings, options: Mapping[str, Any]) -> ServiceSettings:
    """Settings of a service for the new prefix: the environment's, overridden by ``options``.

    A replay always makes batches, whoever takes the trajectories of the live run.
    """
    kind = _settings_class(service)
    known = {name: value for name, value in options.items() if name in kind.model_fields}
    try:
        return load(kind, **{**known, **into.model_dump(), "hand_over": "batches", "dead_letter_limit": NO_LIMIT})
    except ConfigurationError as error:
        raise InvalidInputError(f"settings of the {service}: {error}") from error


def check_options(options: Mapping[str, Any], services: tuple[str, ...]) -> None:
    """Raises InvalidInputError for an option that no service has."""
    known = {name for service in services for name in _settings_class(service).model_fields}
    unknown = sorted(set(options) - (known - set(KafkaSettings.model_fields)))
    if unknown:
        raise InvalidInputError(f"no stage has the setting {', '.join(unknown)}")


def stage_of(service: str, settings: ServiceSettings) -> Processor[Any, Any]:
    """The one stage of a service. Raises ConfigurationError where its settings name no usable strategy."""
    stage: Processor[Any, Any] = _load(service)(settings).stages[0]
    return stage


def grader_of(service: str, settings: ServiceSettings) -> ReplayGrader:
    grader: ReplayGrader = _load(service)(settings)
    return grader


def _settings_class(service: str) -> type[ServiceSettings]:
    return program_settings(service)[service]


def _load(service: str) -> Callable[..., Any]:
    """What the service has registered. Raises ConfigurationError where it is not installed."""
    try:
        for group in (STAGES, GRADERS):
            for point in entry_points(group=group, name=service):
                loaded: Callable[..., Any] = point.load()
                return loaded
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the {service} cannot be loaded ({error}): pip install 'rollmill[services]'"
        ) from error
    raise ConfigurationError(
        f"the {service} is not installed: no entry point {service!r} in {STAGES} or {GRADERS}; "
        "pip install 'rollmill[services]'"
    )
