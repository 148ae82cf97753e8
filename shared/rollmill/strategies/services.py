"""Services outside that evaluators may ask: addresses and keys are the operator's, a spec only names them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class ResourceClass(IntEnum):
    """What an evaluation takes. Each class is read and evaluated apart, so that none waits for another; the order says
    which one something belongs to that is made of several.
    """

    LIGHT = 0
    """Looks at the trajectory alone."""
    REMOTE = 1
    """Waits for a service."""
    CUSTOM = 2
    """A class of your own that says nothing else."""
    SANDBOX = 3
    """Runs code."""

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class ExternalService:
    """Where a service is, and what it is shown."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    """Sent as ``Authorization: Bearer …``."""
    signing_key: str | None = field(default=None, repr=False)
    """Requests are signed with it (`rollmill.signing`), and answers where they have to be."""
