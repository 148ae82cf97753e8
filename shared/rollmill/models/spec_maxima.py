"""The most that a session's spec may ask for: an operator's setting, and no part of a record's schema.

A record that asks for more stays readable; it is refused where it would be served.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class SpecMaxima(BaseModel):
    """Maxima by the names of what specs ask for. The defaults fit the chart's limits of memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_mib: PositiveInt = 2048
    """Of one job in a sandbox; ``ROLLMILL_SANDBOX_JOBS`` of them run at once."""
    address_space_mib: PositiveInt = 2**20
    """Of one process. Reserving takes no memory."""
    disk_mib: PositiveInt = 2048
    """Of each folder that a job writes to. They are in memory, so the job's memory bounds them, too."""
    output_kib: PositiveInt = 16 * 1024
    processes: PositiveInt = 1024
    test_seconds: PositiveFloat = 3600.0
    prepare_seconds: PositiveFloat = 600.0
    deadline_seconds: PositiveFloat = 7 * 24 * 3600.0
    """Of a session; the builder keeps its calls until then."""
    idle_seconds: PositiveFloat = 24 * 3600.0
    evaluation_seconds: PositiveFloat = 24 * 3600.0
    evaluators: PositiveInt = Field(default=64, le=256)
    """The parts of composite ones count, too: parts run at the same time. The reward-merger keeps up to 256 evaluations
    of a session."""
    evaluator_depth: PositiveInt = Field(default=8, le=32)
    """Of composite evaluators inside of composite ones."""
    group_size: PositiveInt = 4096
    metadata_bytes: PositiveInt = 64 * 1024
    """Of a session, as JSON: every stage keeps them."""
