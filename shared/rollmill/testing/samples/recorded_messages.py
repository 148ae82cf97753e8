"""Messages of a topic in a file: for each, 8 bytes of little-endian length, then the value as it was in the log."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

LENGTH = struct.Struct("<Q")


def write_messages(file: Path, messages: Iterable[bytes]) -> None:
    with file.open("wb") as sink:
        for message in messages:
            sink.write(LENGTH.pack(len(message)))
            sink.write(message)


def read_messages(file: Path) -> Iterator[bytes]:
    """Raises ValueError where the file ends within a message."""
    with file.open("rb") as source:
        while prefix := source.read(LENGTH.size):
            length = LENGTH.unpack(prefix)[0] if len(prefix) == LENGTH.size else -1
            message = source.read(max(length, 0))
            if len(message) != length:
                raise ValueError(f"{file} ends within a message")
            yield message
