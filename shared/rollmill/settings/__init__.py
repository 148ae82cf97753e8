"""Settings of all programs: ``ROLLMILL_*`` environment variables, over a file ``rollmill.toml``, over the defaults.

models: those that several programs share; the services' own are in their packages, which programs finds. sources: where
values come from. loading: `load`, which answers every mistake in one line. names: every setting there is, generated.
Imports: models, errors, failpoints.
"""

from rollmill.settings.loading import load
from rollmill.settings.models import ClientSettings, KafkaSettings, ServiceSettings
from rollmill.settings.sources import ProgramSettings

__all__ = ["ClientSettings", "KafkaSettings", "ProgramSettings", "ServiceSettings", "load"]
