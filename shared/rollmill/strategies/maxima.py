"""Whether a spec asks for more than an operator allows. Pure.

What a spec says itself is compared before any strategy is constructed from it; what an evaluator's config asks for is
known to the evaluator alone, which gives it as `ResourceRequest`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from rollmill.errors import InvalidInputError
from rollmill.models import SessionSpec
from rollmill.models.spec_maxima import SpecMaxima

LARGEST = SpecMaxima(evaluators=256, evaluator_depth=32)
"""What no operator may exceed: each level of parts is constructed and run by the one above, on one stack."""
OF_A_SPEC = ("deadline_seconds", "idle_seconds", "evaluation_seconds", "group_size")


@dataclass(frozen=True)
class ResourceRequest:
    """What one field of an evaluator's config asks for."""

    field: str
    """Its place in the config, such as ``resources.memory_mib``."""
    maximum: str
    """The field of `SpecMaxima` that bounds it."""
    value: float


class AboveMaximumError(InvalidInputError):
    """A spec asks for more than the operator allows. The message has the field, its value and the maximum."""

    def __init__(self, field: str, value: object, maxima: SpecMaxima, maximum: str) -> None:
        allowed = getattr(maxima, maximum)
        super().__init__(
            f"{field}: {value} is above the operator's maximum of {allowed} (`{maximum}` of ROLLMILL_SPEC_MAXIMA)"
        )


def require_spec_within(spec: SessionSpec, maxima: SpecMaxima) -> None:
    """Raises AboveMaximumError for what the spec itself asks for, InvalidInputError where it has no JSON form."""
    for name in OF_A_SPEC:
        _require(name, getattr(spec, name), maxima, name)
    _require("metadata", _json_bytes(spec.metadata), maxima, "metadata_bytes", unit=" bytes")
    configs = [evaluator.config for evaluator in spec.evaluators]
    require_countable(configs, maxima)
    _json_bytes([spec.builder.config, *configs])


def require_countable(configs: Iterable[Any], maxima: SpecMaxima = LARGEST) -> None:
    """Raises AboveMaximumError for too many evaluators, or too many inside of each other.

    Found in the configs as they came, without recursion: constructing such evaluators is what has to be avoided.
    """
    count, pending = 0, [(config, 1, True) for config in configs]
    while pending:
        value, depth, is_evaluator = pending.pop()
        count += is_evaluator
        _require("evaluators", count, maxima, "evaluators")
        _require("evaluators", depth, maxima, "evaluator_depth", unit=" inside of each other")
        pending += [(inner, depth + nested, nested) for inner, nested in _inside(value)]


def _inside(value: Any) -> Iterator[tuple[Any, bool]]:
    """The values in ``value``, and whether each is an evaluator's."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for inner in items:
        if isinstance(inner, dict | list | tuple):
            yield inner, isinstance(inner, dict) and "strategy" in inner


def require_requests_within(requests: Iterable[ResourceRequest], maxima: SpecMaxima, prefix: str = "") -> None:
    """Raises AboveMaximumError. ``prefix``: of the fields, where they are in the spec."""
    for request in requests:
        _require(f"{prefix}{request.field}", request.value, maxima, request.maximum)


def _require(field: str, value: float, maxima: SpecMaxima, maximum: str, unit: str = "") -> None:
    if value > getattr(maxima, maximum):
        raise AboveMaximumError(field, f"{value}{unit}", maxima, maximum)


def _json_bytes(value: object) -> int:
    try:
        return len(orjson.dumps(value))
    except (TypeError, ValueError) as error:  # such as 300 objects inside of each other
        raise InvalidInputError(f"the spec cannot be written as JSON: {error}") from error
