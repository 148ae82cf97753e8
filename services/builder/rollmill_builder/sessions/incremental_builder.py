"""Incremental custom builders: they get each call as it is accepted, live and at restore alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollmill.errors import InvalidInputError
from rollmill.models import CompletionRecord, CompletionSession, SessionSpec, Trajectory
from rollmill.strategies import BaseIncrementalBuilder, BaseTrajectoryBuilder, StrategyRegistry
from rollmill.strategies.foreign_code import contained, describe

Registry = StrategyRegistry[BaseTrajectoryBuilder]

MAX_ERROR = 2000
"""Characters of a custom builder's error that are kept."""


class FoldingFailedError(Exception):
    """A builder raised when it was given a call. The class's name is part of the trajectory's error text."""


@dataclass(frozen=True)
class IncrementalBuild:
    """A builder, and its state after some calls."""

    builder: BaseIncrementalBuilder[Any] | None
    state: Any
    error: str | None = None
    """Where it failed; then it gets no further call, and the session ends with this error."""

    def add(self, record: CompletionRecord) -> IncrementalBuild:
        """The build after one more call."""
        if self.builder is None or self.error is not None:
            return self
        builder = self.builder
        return _guarded(builder, lambda: builder.add(self.state, record))

    def finish(self, session: CompletionSession) -> Trajectory:
        """Raises FoldingFailedError, and whatever the builder raises."""
        if self.builder is None or self.error is not None:
            raise FoldingFailedError(self.error)
        with contained():
            return self.builder.finish(self.state, session)


def incremental_build(
    registry: Registry, spec: SessionSpec, records: list[CompletionRecord]
) -> IncrementalBuild | None:
    """The calls of a session in a fresh builder; None where the session's builder is not incremental."""
    try:
        if not issubclass(registry.find(spec.builder.strategy), BaseIncrementalBuilder):
            return None
        builder = registry.create(spec.builder)
    except InvalidInputError:
        return None
    if not isinstance(builder, BaseIncrementalBuilder):
        return None
    build = _guarded(builder, builder.start)
    for record in records:
        build = build.add(record)
    return build


def error_text(error: BaseException) -> str:
    """Type and text of an error, without memory addresses: the same session gives the same bytes (rule E3)."""
    return re.sub(r"0x[0-9a-fA-F]+", "0x", describe(error))[:MAX_ERROR]


def _guarded(builder: BaseIncrementalBuilder[Any], step: Callable[[], Any]) -> IncrementalBuild:
    try:
        with contained():
            return IncrementalBuild(builder, step())
    except Exception as error:  # noqa: BLE001  # foreign code may raise anything, and no session may be lost by it
        return IncrementalBuild(builder, None, error_text(error))
