"""Further values per token, of any of a few dtypes and of any shape behind the token: a pydantic field type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from rollmill.models.base import PackedArray

DTYPES = ("float32", "int32", "int16", "uint8")
PLAIN = PackedArray("float32")

Form = tuple[str, tuple[int, ...]]
"""dtype, and shape behind the token."""


def form_of(values: npt.NDArray[Any]) -> Form:
    return values.dtype.name, values.shape[1:]


def missing(dtype: npt.DTypeLike) -> float:
    """The value at tokens that have none: 0.0, -1, or the largest number where there is no sign."""
    kind = np.dtype(dtype)
    return {"f": 0.0, "i": -1.0}.get(kind.kind, float(np.iinfo(kind).max) if kind.kind == "u" else 0.0)


class ExtraArray:
    """An array [r, ...] of float32, int32, int16 or uint8, one row per token.

    One number per token in float32 is packed bytes or a list. Anything else is an object with ``dtype``, ``shape`` and
    ``data`` (packed little-endian bytes; in JSON the numbers, flat). Raises ValueError for any other.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate,
            serialization=core_schema.plain_serializer_function_ser_schema(_dump, info_arg=True),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        form = {
            "dtype": {"enum": list(DTYPES)},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "data": {"type": "array", "items": {"type": "number"}},
        }
        table = {"type": "object", "properties": form, "required": list(form), "additionalProperties": False}
        return {"anyOf": [{"type": "array", "items": {"type": "number"}, "x-packed": "<f4"}, table]}

    def validate(self, value: object) -> npt.NDArray[Any]:
        if isinstance(value, Mapping):
            return _table(value)
        if isinstance(value, np.ndarray) and (value.ndim != 1 or value.dtype.name in DTYPES[1:]):
            return _checked(value.copy() if value.flags.writeable else value)
        return PLAIN.validate(value)


def _table(value: Mapping[str, Any]) -> npt.NDArray[Any]:
    if set(value) != {"dtype", "shape", "data"} or value["dtype"] not in DTYPES:
        raise ValueError(f"dtype (one of {', '.join(DTYPES)}), shape and data are expected")
    flat = PackedArray(value["dtype"]).validate(value["data"])
    return _checked(flat.reshape([int(size) for size in value["shape"]]))


def _checked(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.name not in DTYPES or not array.ndim:
        raise ValueError(f"one row per token of {', '.join(DTYPES)} is expected, not {array.dtype.name} {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("a value is not finite")
    array.flags.writeable = False
    return array


def _dump(array: npt.NDArray[Any], info: core_schema.SerializationInfo) -> Any:
    data = array.ravel().tolist() if info.mode == "json" else array.tobytes()
    if array.ndim == 1 and array.dtype == np.float32:
        return data
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


Extra = Annotated[npt.NDArray[Any], ExtraArray()]
"""[r, ...], one row per token of a response."""
