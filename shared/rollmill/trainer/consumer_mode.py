"""One consumer of record per run: which one the setting `hand_over` allows (rule A9)."""

from __future__ import annotations

from rollmill.errors import ConfigurationError
from rollmill.settings import KafkaSettings


def require_consumer_mode(settings: KafkaSettings, wanted: str, reader: str) -> None:
    """Raises ConfigurationError where the setting is not ``wanted``. ``reader``: the class, for the message."""
    if settings.hand_over != wanted:
        raise ConfigurationError(
            f"run {settings.run!r} of prefix {settings.prefix!r} is handed over as {settings.hand_over}, {reader} "
            f"reads {wanted}: set hand_over (ROLLMILL_HAND_OVER={wanted}) for all of its programs, the batcher "
            "included, or use another prefix"
        )
