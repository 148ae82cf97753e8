"""Points in time, as they are typed on the command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from rollmill.errors import InvalidInputError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_time(text: str, now: float) -> float:
    """Seconds since the epoch of an ISO 8601 time (UTC unless it says so), or of a time ago: ``90s``, ``2h``, ``3d``.

    Raises InvalidInputError.
    """
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if ago is not None:
        return now - float(ago[1]) * UNITS[ago[2]]
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInputError(
            f"{text!r} is no time: 2026-05-01T12:00 is, and so is 2h for two hours ago (s, m, h, d)"
        ) from error
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
