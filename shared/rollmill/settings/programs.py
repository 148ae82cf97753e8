"""The settings classes of the services that are installed, found by entry points: no service is imported before."""

from __future__ import annotations

from importlib.metadata import entry_points

from rollmill.errors import ConfigurationError
from rollmill.settings.models import ServiceSettings

GROUP = "rollmill.settings"


def program_settings(*names: str) -> dict[str, type[ServiceSettings]]:
    """By service; none named: of all. Raises ConfigurationError where one is not installed."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    missing = [name for name in names if name not in points]
    if missing:
        raise ConfigurationError(
            f"no service {missing[0]!r} is installed: there is {', '.join(sorted(points)) or 'none'}"
        )
    try:
        return {name: point.load() for name, point in points.items() if not names or name in names}
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the services are not installed here (no module {error.name!r}): pip install 'rollmill[services]'"
        ) from error
