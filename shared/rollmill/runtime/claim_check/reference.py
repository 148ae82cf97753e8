"""What a record carries in place of a large value: where its bytes are, and how to know them."""

from __future__ import annotations

import hashlib

import orjson
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from rollmill.codec import REFERENCE
from rollmill.errors import PoisonRecordError

MOST_BYTES = 512
"""Of a reference; a longer one is not read."""


class BlobReference(BaseModel):
    """The content's own digest is its name: equal values give equal records and one blob (rule E3).

    Fields that a newer release adds are ignored.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    sha256: str = Field(pattern=r"\A[0-9a-f]{64}\z")
    """Lower-case hexadecimal; name and checksum in one."""
    size: PositiveInt
    """Bytes of the value."""
    content_type: str = Field(max_length=100)

    @classmethod
    def to(cls, value: bytes, content_type: str) -> BlobReference:
        return cls(sha256=hashlib.sha256(value).hexdigest(), size=len(value), content_type=content_type)

    def encode(self) -> bytes:
        return REFERENCE + orjson.dumps(self.model_dump(), option=orjson.OPT_SORT_KEYS)

    @classmethod
    def decode(cls, value: bytes) -> BlobReference:
        """Raises PoisonRecordError ``malformed``."""
        if len(value) > MOST_BYTES:
            raise PoisonRecordError("malformed", f"a reference of {len(value)} bytes, at most {MOST_BYTES} are read")
        try:
            return cls.model_validate(orjson.loads(value[len(REFERENCE) :]))
        except ValidationError as error:
            raise PoisonRecordError("malformed", f"no reference to a blob: {error.error_count()} mistakes") from error
        except ValueError as error:
            raise PoisonRecordError("malformed", f"no reference to a blob: {error}") from error

    def matches(self, content: bytes) -> bool:
        return len(content) == self.size and hashlib.sha256(content).hexdigest() == self.sha256


def is_reference(value: bytes | None) -> bool:
    return value is not None and value.startswith(REFERENCE)
