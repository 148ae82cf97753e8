"""The services' own stages and settings. This library knows no service, so they are found by their module names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, get_type_hints

from pydantic import ValidationError

from rollmill.errors import ConfigurationError, InvalidInputError
from rollmill.runtime.stream.processor import Processor
from rollmill.settings import KafkaSettings, ServiceSettings

NO_LIMIT = 2**31 - 1
"""A replay meets the live run's poison again, all of it at once."""


def settings_of(service: str, into: KafkaSettings, options: Mapping[str, Any]) -> ServiceSettings:
    """Settings of a service for the new prefix: the environment's, with ``options`` laid over them."""
    kind: type[ServiceSettings] = get_type_hints(_module(service, "app").build)["settings"]
    known = {name: value for name, value in options.items() if name in kind.model_fields}
    try:
        return kind(**{**known, **into.model_dump(), "dead_letter_limit": NO_LIMIT})
    except ValidationError as error:
        complaints = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise InvalidInputError(f"settings of the {service}: {complaints}") from error


def check_options(options: Mapping[str, Any], services: tuple[str, ...]) -> None:
    """Raises InvalidInputError for an option that no service has."""
    known: set[str] = set()
    for service in services:
        known |= set(get_type_hints(_module(service, "app").build)["settings"].model_fields)
    unknown = sorted(set(options) - (known - set(KafkaSettings.model_fields)))
    if unknown:
        raise InvalidInputError(f"no stage has the setting {', '.join(unknown)}")


def stage_of(service: str, settings: ServiceSettings) -> Processor[Any, Any]:
    """The one stage of a service. Raises ConfigurationError where its settings name no usable strategy."""
    stage: Processor[Any, Any] = _module(service, "app").build(settings).stages[0]
    return stage


def grading() -> Any:
    """The evaluator's own way of running a strategy under a deadline."""
    return _module("evaluator", "grading")


def _module(service: str, part: str) -> Any:
    name = f"rollmill_{service.replace('-', '_')}.{part}"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{name} is missing ({error}): pip install 'rollmill[services]'") from error
