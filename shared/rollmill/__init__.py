"""Rollmill: from an agent's model calls to GPU-ready training batches, exactly once, on Kafka.

Importing this package pulls in neither torch nor a service; see ``docs/architecture.md`` for the map.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.client import Session

__version__ = "0.1.0"


def session(*args: Any, **spec: Any) -> Session:
    """A session at capture, as a context manager; see `rollmill.client.session`."""
    from rollmill.client import session as make  # noqa: PLC0415  # `import rollmill` stays light

    return make(*args, **spec)
