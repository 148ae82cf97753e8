"""Settings of the reward-merger, from ``ROLLMILL_*`` environment variables."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rollmill.settings import ServiceSettings
from rollmill_reward_merger.timers import Windows


class RewardMergerSettings(ServiceSettings):
    section: ClassVar[str] = "reward-merger"

    revision_window_seconds: float = Field(default=600.0, ge=0)
    """From the first merge: how long late and revised evaluations make revisions. The trajectory stays in memory for
    that time, so this bounds memory. Name a slower grader as an evaluator in the session's spec: it is awaited then."""
    marker_window_seconds: float = Field(default=3600.0, ge=0)
    """From then on: how long duplicates are distinguished from late evaluations; a few bytes per session."""
    orphan_window_seconds: float = Field(default=86_400.0, ge=0)
    """How long an evaluation waits for a trajectory: a reward may be given while the session still runs."""

    @property
    def windows(self) -> Windows:
        return Windows(
            revisions=self.revision_window_seconds,
            markers=self.marker_window_seconds,
            orphans=self.orphan_window_seconds,
        )
