"""Incremental custom builders: fed with each call as it is accepted, live and at restore alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollmill.errors import InvalidInputError
from rollmill.models import CompletionRecord, CompletionSession, SessionSpec, Trajectory
from rollmill.strategies import BaseIncrementalBuilder, BaseTrajectoryBuilder, StrategyRegistry

Registry = StrategyRegistry[BaseTrajectoryBuilder]

MAX_ERROR = 2000
"""Characters of a foreign error that are kept."""


class FoldingFailedError(Exception):
    """A builder raised when it was given a call."""


@dataclass(frozen=True)
class Folded:
    """A builder, and its state after some calls."""

    builder: BaseIncrementalBuilder[Any] | None
    state: Any
    error: str | None = None
    """Where it failed; then nothing more is given to it, and the session ends with this error."""

    def then(self, record: CompletionRecord) -> Folded:
        if self.builder is None or self.error is not None:
            return self
        builder = self.builder
        return _guarded(builder, lambda: builder.add(self.state, record))

    def finish(self, session: CompletionSession) -> Trajectory:
        """Raises FoldingFailedError, and whatever the builder raises."""
        if self.builder is None or self.error is not None:
            raise FoldingFailedError(self.error)
        return self.builder.finish(self.state, session)


def folded(registry: Registry, spec: SessionSpec, records: list[CompletionRecord]) -> Folded | None:
    """The calls of a session in a fresh builder; None where the session's builder is not incremental."""
    try:
        if not issubclass(registry.find(spec.builder.strategy), BaseIncrementalBuilder):
            return None
        builder = registry.create(spec.builder)
    except InvalidInputError:
        return None
    if not isinstance(builder, BaseIncrementalBuilder):
        return None
    found = _guarded(builder, builder.start)
    for record in records:
        found = found.then(record)
    return found


def described(error: Exception) -> str:
    """Type and text of an error, without memory addresses: the same session gives the same bytes (rule E3)."""
    return re.sub(r"0x[0-9a-fA-F]+", "0x", f"{type(error).__name__}: {error}")[:MAX_ERROR]


def _guarded(builder: BaseIncrementalBuilder[Any], step: Callable[[], Any]) -> Folded:
    try:
        return Folded(builder, step())
    except Exception as error:  # noqa: BLE001  # foreign code may raise anything, and no session may be lost by it
        return Folded(builder, None, described(error))
