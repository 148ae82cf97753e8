"""The parameters of a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from rollmill.errors import InvalidInputError
from rollmill.models import EvaluatorSpec, SessionOpened, SessionSpec, StrategySpec
from rollmill.settings import KafkaSettings
from rollmill.strategies import builder_registry, evaluator_registry


@dataclass(frozen=True)
class Plan:
    """``builder`` and ``evaluators`` None: each session's own; then the recorded evaluations are used."""

    live: KafkaSettings
    into: KafkaSettings
    builder: StrategySpec | None = None
    evaluators: tuple[EvaluatorSpec, ...] | None = None
    since: float | None = None
    """Sessions that begin at this event time or later."""
    from_offset: Mapping[int, int] | int | None = None
    """Sessions that begin at this offset of their partition or later; a mapping is by partition."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the services that override the environment's, such as ``max_staleness``."""

    def check(self) -> None:
        """Raises InvalidInputError for a prefix, strategy or config that cannot be used."""
        if self.into.prefix == self.live.prefix:
            raise InvalidInputError(f"{self.into.prefix!r} is the live prefix itself: give another one with --into")
        if self.builder is not None:
            builder_registry().create(self.builder)
        for evaluator in self.evaluators or ():
            evaluator_registry().create(evaluator)

    def respecified(self, spec: SessionSpec) -> SessionSpec:
        changes = {"builder": self.builder, "evaluators": self.evaluators}
        return spec.replace(**{name: value for name, value in changes.items() if value is not None})

    def reopened(self, event: SessionOpened) -> SessionOpened:
        return event.replace(spec=self.respecified(event.spec))

    @property
    def respecifies(self) -> bool:
        return self.builder is not None or self.evaluators is not None

    def starts_at(self, partition: int) -> int:
        """First offset of a partition that a session may begin at."""
        if isinstance(self.from_offset, Mapping):
            return self.from_offset.get(partition, 0)
        return self.from_offset or 0


def settings_into(live: KafkaSettings, prefix: str) -> KafkaSettings:
    """The same cluster and run under another prefix. Raises InvalidInputError for one that Kafka does not take."""
    if not prefix:
        raise InvalidInputError("a replay needs its own prefix: give one with --into")
    try:
        return KafkaSettings.model_validate({**live.model_dump(), "prefix": prefix})
    except ValidationError as error:
        raise InvalidInputError(f"{prefix!r} is no prefix: letters, digits, _ and -, with a dot at the end") from error
