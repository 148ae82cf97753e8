"""Settings of the builder."""

from __future__ import annotations

from pydantic import Field

from rollmill.settings import ServiceSettings


class BuilderSettings(ServiceSettings):
    late_window_seconds: float = Field(default=6 * 3600.0, gt=0)
    """How long a closed session is remembered, in event time: a call of it that comes again within this time is a
    duplicate, a new one is late; after it, either would open the session anew."""
    expiry_seconds: float = Field(default=1.0, gt=0)
    """How often open sessions are looked through for deadlines and idle times."""
