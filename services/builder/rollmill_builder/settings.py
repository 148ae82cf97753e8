"""Settings of the builder."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from rollmill.settings import ServiceSettings


class BuilderSettings(ServiceSettings):
    section: ClassVar[str] = "builder"

    late_window_seconds: float = Field(default=6 * 3600.0, gt=0)
    """How long a closed session is remembered, in event time: a call of it that is received again within this time is
    a duplicate, a new one is late. After it, a record that is older than what is remembered, and of a session that is
    not known, is set aside as ``too_old``: make it longer than the longest outage that capture's spool bridges."""
    expiry_seconds: float = Field(default=1.0, gt=0)
    """How often open sessions are checked for deadlines and idle times; less often where there are thousands."""
    memory_budget_bytes: PositiveInt = 1536 * 2**20
    """For the open sessions of one task (a process runs several). Above it the calls of the longest untouched sessions
    move to a local file; where none can move, the longest idle session ends, with reason ``memory_budget``."""
    spill_bytes: NonNegativeInt = 16 * 2**30
    """Size of that file at most, per task; 0: sessions are ended instead of moved."""
    spill_directory: Path | None = None
    """Directory of that file; None: the system's directory for temporary files. A restart may lose its content."""
