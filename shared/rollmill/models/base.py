"""What every record shares: frozen, nothing unknown accepted, arrays compared by content."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

IDENTIFIER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"


class Record(BaseModel):
    """Base of all models that travel over Kafka.

    Equality compares array fields element by element. Records are not hashable: they hold arrays.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(mine, getattr(other, name)) for name, mine in self)

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self).model_validate({**dict(self), **changes})


def _same(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return (
            isinstance(left, np.ndarray)
            and isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and np.array_equal(left, right)
        )
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(value, right[name]) for name, value in left.items())
    return bool(left == right)


def _refuse_lookalikes(value: object) -> object:
    if isinstance(value, (bool, str, bytes)):
        raise ValueError(f"a number is expected, not {type(value).__name__} {value!r}")
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"a finite number is expected, not {value}")
    return value


FiniteFloat = Annotated[float, BeforeValidator(_refuse_lookalikes), AfterValidator(_finite)]
"""A finite float. ``bool``, text, NaN and the infinities are refused, never coerced."""

LARGEST_REWARD = 3.4e38
"""Batches hold rewards as float32."""

Reward = Annotated[FiniteFloat, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]
"""A finite float that float32 holds."""

NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
"""A whole number from 0; ``true``, text and ``1.0`` are refused."""

PositiveInt = Annotated[int, Field(strict=True, gt=0)]
"""A whole number from 1; ``true``, text and ``1.0`` are refused."""

Identifier = Annotated[str, Field(pattern=IDENTIFIER_PATTERN)]
"""An id chosen by a caller: a letter or digit, then up to 127 of ``[A-Za-z0-9_.-]``."""

EventTime = Annotated[FiniteFloat, Field(ge=0)]
"""Seconds since the Unix epoch, a field of the payload; a Kafka timestamp is never read (rule E1)."""


def is_identifier(value: str) -> bool:
    return re.match(IDENTIFIER_PATTERN, value) is not None


def dump_json(value: object) -> bytes:
    """Canonical JSON (sorted keys): equal values give equal bytes. Named tuples are arrays."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


IntVector = npt.NDArray[np.int32]
MaskVector = npt.NDArray[np.uint8]
FloatVector = npt.NDArray[np.float32]
