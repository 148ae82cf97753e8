"""The options of the builders, and their checks: a bad config is refused when the session opens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollmill.strategies.decoding import Decode

OnDrift = Literal["repair", "fork", "fork_over_n"]
OnScaffold = Literal["fork", "merge"]
Siblings = Literal["keep", "exclude"]
Retried = Literal["keep", "exclude"]
OverLong = Literal["cut", "split", "exclude"]


@dataclass(frozen=True)
class DriftRules:
    """What to do about a re-tokenised copy (rule A10), and about a generation prompt that history does not keep."""

    on_drift: OnDrift = "repair"
    max_drift_tokens: int = 0
    """With ``fork_over_n``: more sampled tokens than this in another tokenisation start a new trace."""
    on_scaffold: OnScaffold = "fork"
    decode: Decode | None = None


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ValueError."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def check_count(name: str, value: object, least: int = 0) -> None:
    """Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, {least} or more")
