"""A clock that the harness can shift for all processes at once: the system's time plus the offset in a file."""

from __future__ import annotations

import time
from pathlib import Path

CLOCK_FILE = "clock"
READ_SECONDS = 0.05


class ShiftedClock:
    """Implements `rollmill.runtime.telemetry.clock.Clock`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0.0
        self._read_at = -READ_SECONDS

    def now(self) -> float:
        """Seconds since the epoch, by this clock."""
        if time.monotonic() - self._read_at >= READ_SECONDS:
            self._read_at = time.monotonic()
            self._offset = float(self._file.read_text()) if self._file.exists() else 0.0
        return time.time() + self._offset


def shift(file: Path, offset: float) -> None:
    """Shift all clocks that read ``file`` to the system's time plus ``offset`` seconds."""
    new = file.with_suffix(".new")
    new.write_text(str(offset))
    new.replace(file)
