"""External services for evaluators: the operator configures addresses and keys, a spec only names the service."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class ResourceClass(IntEnum):
    """What an evaluation needs. Each class is consumed separately, so that none waits for another; of several classes
    the highest counts (composite evaluators).
    """

    LIGHT = 0
    """Needs the trajectory only."""
    REMOTE = 1
    """Waits for a service."""
    CUSTOM = 2
    """The default of custom evaluators."""
    SANDBOX = 3
    """Runs code."""

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class ExternalService:
    """Address of a service, and the keys for it."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    """Sent as ``Authorization: Bearer …``."""
    signing_key: str | None = field(default=None, repr=False)
    """Requests are signed with it (`rollmill.signing`), and so are answers where that is required."""
