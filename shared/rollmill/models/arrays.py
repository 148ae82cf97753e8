"""Token arrays and JSON text as field types: packed bytes inside, lists and objects in JSON (rule C2).

In Python mode (and so in MessagePack) an array field serialises to little-endian packed bytes without
passing through a list; in JSON mode it is a list of numbers. Both are accepted on the way in.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


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
            return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        if isinstance(value, bytes) and value[:1] in (b"{", b"["):
            return value
        raise ValueError("a JSON object or array, or the bytes of one, is expected")


def _dump_text(text: bytes, info: core_schema.SerializationInfo) -> Any:
    return orjson.loads(text) if info.mode == "json" else text


JsonBytes = Annotated[bytes, JsonText()]
"""A JSON object or array kept as bytes; ``orjson.loads`` reads it."""
