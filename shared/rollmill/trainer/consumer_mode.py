"""One consumer of record per run: what the setting `hand_over` allows (rule A9)."""

from __future__ import annotations

from rollmill.errors import ConfigurationError
from rollmill.settings import KafkaSettings


def refuse_other_hand_over(settings: KafkaSettings, wanted: str, who: str) -> None:
    """Raises ConfigurationError where the run is handed over otherwise."""
    if settings.hand_over != wanted:
        raise ConfigurationError(
            f"run {settings.run!r} of prefix {settings.prefix!r} is handed over as {settings.hand_over}, {who} reads "
            f"{wanted}: set hand_over (ROLLMILL_HAND_OVER={wanted}) for all of its programs, the batcher included, or "
            "use another prefix"
        )
