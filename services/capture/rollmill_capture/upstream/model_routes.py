"""Model names to routes, with the defaults filled in once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rollmill_capture.model_config import Route
from rollmill_capture.settings import CaptureSettings


@dataclass(frozen=True)
class Target:
    """A route, and where exactly its calls go."""

    route: Route
    base_url: str
    """Ends with ``/v1``."""
    authorization: str | None
    """Value of the header for the upstream; None: it asks for none."""
    others: tuple[str, ...] = ()
    """Roots of further replicas."""

    @property
    def replicas(self) -> tuple[str, ...]:
        """Roots of all replicas."""
        return (self.root, *self.others)

    @property
    def root(self) -> str:
        """The base URL without ``/v1``."""
        return self.base_url.removesuffix("/v1")


class RouteTable:
    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._default = self._target(settings.default_route)
        self._targets = {model: self._target(route) for model, route in settings.routes.items()}

    @property
    def trained(self) -> tuple[Target, ...]:
        """Where calls that can be trained go."""
        return tuple(target for target in (self._default, *self._targets.values()) if target.route.trainable)

    def find(self, model: str | None) -> Target:
        """The target of a model name as the client says it; None is a request without one."""
        return self._default if model is None else self._targets.get(model, self._default)

    def _target(self, route: Route) -> Target:
        key = route.api_key or self._settings.upstream_api_key
        first, *others = [_root(url) for url in (route.upstream or self._settings.upstream, *route.replicas)]
        bearer = None if key is None else f"Bearer {key.get_secret_value()}"
        return Target(route, f"{first}/v1", bearer, tuple(others))


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
