"""Rollmill: from an agent's model calls to GPU-ready training batches, exactly once, on Kafka.

Importing this package pulls in neither torch nor a service; see ``docs/architecture.md`` for the map.
"""

__version__ = "0.1.0"
