"""Settings of the builder."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt

from rollmill.settings import ServiceSettings


class BuilderSettings(ServiceSettings):
    late_window_seconds: float = Field(default=6 * 3600.0, gt=0)
    """How long a closed session is remembered, in event time: a call of it that comes again within this time is a
    duplicate, a new one is late; after it, either would open the session anew."""
    expiry_seconds: float = Field(default=1.0, gt=0)
    """How often open sessions are looked through for deadlines and idle times; more seldom where they are thousands."""
    memory_budget_bytes: PositiveInt = 1536 * 2**20
    """For the open sessions of one task (a process runs several). Above it the calls of the longest untouched sessions
    move to a local file; what cannot move ends, the longest idle session first, reason ``memory_budget``."""
    spill_bytes: NonNegativeInt = 16 * 2**30
    """Size of that file at most, per task; 0: sessions are not moved, they end."""
    spill_directory: Path | None = None
    """Where that file is; None: the system's place for temporary files. Its content may be lost at any restart."""
