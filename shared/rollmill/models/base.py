"""What every record shares: frozen, unknown fields carried on, arrays compared by content; and the types of its fields.

A newer release may add optional fields. A record that is read keeps those that this release does not know and writes
them again; what a person writes, in Python or as JSON for a service, is checked name by name (`validate_strictly`).

Token arrays and JSON text are packed bytes inside, and lists and objects in JSON (rule C2): in Python mode (and so in
MessagePack) an array field serialises to little-endian packed bytes without passing through a list, in JSON mode it is
a list of numbers. Both are accepted on the way in.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

IDENTIFIER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"


class Record(BaseModel):
    """Base of all models that travel over Kafka.

    ``model_validate`` and `rollmill.codec.decode` keep unknown fields in ``model_extra``, at every depth, and every
    copy and encoding has them (rule C7; bytes are base64 in JSON). The constructor refuses unknown names.

    Equality compares array fields element by element, and unknown fields, too. Records are not hashable: they hold
    arrays.
    """

    model_config = ConfigDict(frozen=True, extra="allow", arbitrary_types_allowed=True, ser_json_bytes="base64")

    if not TYPE_CHECKING:  # mypy's plugin knows the fields of each model

        def __init__(self, /, **fields: Any) -> None:
            """Raises ValidationError, also for a name that is no field."""
            self.__pydantic_validator__.validate_python(fields, self_instance=self, extra="forbid")

        __init__.__pydantic_base_init__ = True  # without it pydantic would call it for what it reads, as well

    @classmethod
    def validate_strictly(cls, value: object) -> Self:
        """What a person wrote. Raises ValidationError, also for a name that is no field, at any depth."""
        return cls.model_validate(value, extra="forbid")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _same(dict(self), dict(other))

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
    return re.fullmatch(IDENTIFIER_PATTERN, value) is not None


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


class PackedArray:
    """Annotation that makes a one-dimensional numpy array of one dtype a pydantic field.

    Accepts packed little-endian bytes, a list or tuple of numbers, or an array of the same kind.
    Booleans are no numbers, floats are no ids, and values outside ``low..high`` are refused.
    """

    def __init__(self, dtype: str, *, low: float | None = None, high: float | None = None) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.low, self.high = low, high

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate,
            serialization=core_schema.plain_serializer_function_ser_schema(_dump_array, info_arg=True),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        item: dict[str, Any] = {"type": "number" if self.dtype.kind == "f" else "integer"}
        if self.low is not None:
            item["minimum"] = self.low
        if self.high is not None:
            item["maximum"] = self.high
        return {"type": "array", "items": item, "x-packed": self.dtype.str}

    def validate(self, value: object) -> npt.NDArray[Any]:
        array = self._from(value)
        if array.ndim != 1:
            raise ValueError(f"one dimension is expected, not {array.ndim}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"value {int(np.flatnonzero(~np.isfinite(array))[0])} is not finite")
        self._check_range(array)
        array.flags.writeable = False
        return array

    def _from(self, value: object) -> npt.NDArray[Any]:
        if isinstance(value, (bytes, bytearray, memoryview)):
            if len(value) % self.dtype.itemsize:
                raise ValueError(f"{len(value)} bytes are no whole number of {self.dtype.name} values")
            return np.frombuffer(value, dtype=self.dtype)
        if isinstance(value, (list, tuple)):
            return self._from_numbers(value)
        if isinstance(value, np.ndarray):
            return self._from_ndarray(value)
        raise ValueError(f"packed bytes or a list of numbers is expected, not {type(value).__name__}")

    def _from_numbers(self, value: list[Any] | tuple[Any, ...]) -> npt.NDArray[Any]:
        allowed = {int, float} if self.dtype.kind == "f" else {int}
        strange = set(map(type, value)) - allowed
        if strange:
            names = ", ".join(sorted(kind.__name__ for kind in strange))
            raise ValueError(f"every value must be a number of kind {self.dtype.name}, found {names}")
        try:
            wide = np.array(value, dtype=np.float64 if self.dtype.kind == "f" else np.int64)
        except OverflowError as error:
            raise ValueError(f"a value does not fit {self.dtype.name}") from error
        self._check_range(wide)
        narrow = wide.astype(self.dtype)
        if self.dtype.kind != "f" and not np.array_equal(narrow, wide):
            raise ValueError(f"a value does not fit {self.dtype.name}")
        return narrow

    def _from_ndarray(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if value.dtype == self.dtype:
            return value if not value.flags.writeable else value.copy()
        if value.dtype.kind not in ("iuf" if self.dtype.kind == "f" else "iu"):
            raise ValueError(f"an array of kind {self.dtype.name} is expected, not {value.dtype.name}")
        self._check_range(value)
        return value.astype(self.dtype)

    def _check_range(self, array: npt.NDArray[Any]) -> None:
        if not array.size:
            return
        if self.low is not None and array.min() < self.low:
            raise ValueError(f"values below {self.low} are refused, found {array.min()}")
        if self.high is not None and array.max() > self.high:
            raise ValueError(f"values above {self.high} are refused, found {array.max()}")


def _dump_array(array: npt.NDArray[Any], info: core_schema.SerializationInfo) -> list[Any] | bytes:
    return array.tolist() if info.mode == "json" else array.tobytes()


TokenIds = Annotated[npt.NDArray[np.int32], PackedArray("int32", low=0, high=2**31 - 1)]
"""Token ids, int32, one per token."""

LossMask = Annotated[npt.NDArray[np.uint8], PackedArray("uint8", low=0, high=1)]
"""uint8, one per token: 1 = sampled by the policy and trained, 0 = context."""

LogProbs = Annotated[npt.NDArray[np.float32], PackedArray("float32")]
"""Natural log-probabilities, float32, finite, one per token ("at token")."""

Values = Annotated[npt.NDArray[np.float32], PackedArray("float32")]
"""Any finite float32 per token: rewards, weights, temperatures."""


class JsonText:
    """Annotation of a field that holds a JSON object or array as its UTF-8 bytes, parsed only when asked.

    Accepts bytes or text of JSON, or an object or list; serialises to bytes (Python mode) or the object (JSON mode).
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate,
            serialization=core_schema.plain_serializer_function_ser_schema(_dump_text, info_arg=True),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": ["object", "array"]}

    @staticmethod
    def validate(value: object) -> bytes:
        if isinstance(value, (dict, list, tuple)):
            try:
                return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
            except TypeError as error:
                raise ValueError(f"it holds what JSON cannot represent: {error}") from error
        if isinstance(value, bytes) and value[:1] in (b"{", b"["):
            return value
        raise ValueError("a JSON object or array, or the bytes of one, is expected")


def _dump_text(text: bytes, info: core_schema.SerializationInfo) -> Any:
    return orjson.loads(text) if info.mode == "json" else text


JsonBytes = Annotated[bytes, JsonText()]
"""A JSON object or array kept as bytes; ``orjson.loads`` reads it."""
