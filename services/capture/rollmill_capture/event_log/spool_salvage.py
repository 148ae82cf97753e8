"""Rows out of a damaged file: every page is searched for whole rows, since no index or root can be relied on.

Only what SQLite documents of its file format is used: leaf pages of tables, their cells, chains of overflow pages. A
row's digest tells whether what was found is what was written. Removed rows that the file still holds are found too:
they are sent again, and readers recognise them as duplicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

DEFAULT_PAGE = 4096
TABLE_LEAF = 0x0D
FIRST_SIZED = 12
"""From this serial type on a column is a blob or a text, of a size that the type tells."""
MORE = 0x80
"""Bit of a byte of a varint: another one follows."""
_MAGIC = b"SQLite format 3\x00"
_FIXED = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8, 7: 8, 8: 0, 9: 0}
"""Bytes of a column by its serial type."""


class NoRowError(ValueError):
    """What is here is no row that could be read."""


@dataclass(frozen=True)
class FoundRow:
    number: int
    columns: list[bytes | str | int | None]


@dataclass(frozen=True)
class DamagedFile:
    """Opened for reading; ``size`` is that of a page."""

    file: BinaryIO
    size: int
    pages: int

    def rows(self) -> Iterator[FoundRow | None]:
        """Every cell of every leaf page; None: one that cannot be read."""
        for number in range(2, self.pages + 1):
            page = self.page(number)
            if page[:1] == bytes([TABLE_LEAF]):
                yield from self._cells(page)

    def page(self, number: int) -> bytes:
        if not 0 < number <= self.pages:
            raise NoRowError(f"no page {number}")
        self.file.seek((number - 1) * self.size)
        return self.file.read(self.size)

    def _cells(self, page: bytes) -> Iterator[FoundRow | None]:
        count = int.from_bytes(page[3:5], "big")
        for at in range(8, 8 + 2 * min(count, (len(page) - 8) // 2), 2):
            try:
                yield self._row(page, int.from_bytes(page[at : at + 2], "big"))
            except (NoRowError, IndexError, OSError):
                yield None

    def _row(self, page: bytes, at: int) -> FoundRow:
        size, at = _varint(page, at)
        number, at = _varint(page, at)
        return FoundRow(number, _columns(self._payload(page, at, size)))

    def _payload(self, page: bytes, at: int, size: int) -> bytes:
        """``size`` bytes, of which the page holds the first; the rest is in a chain of overflow pages."""
        if size > self.pages * self.size:
            raise NoRowError(f"{size} bytes in one row")
        local = _local_bytes(size, self.size)
        if local == size:
            return page[at : at + size]
        parts, rest = [page[at : at + local]], size - local
        following = int.from_bytes(page[at + local : at + local + 4], "big")
        while rest > 0:
            overflow = self.page(following)
            parts.append(overflow[4 : 4 + rest])
            rest -= self.size - 4
            following = int.from_bytes(overflow[:4], "big")
        return b"".join(parts)


def open_damaged(file: BinaryIO, path: Path) -> DamagedFile:
    head = file.read(18)
    size = int.from_bytes(head[16:18], "big")
    known = head.startswith(_MAGIC) and size in {512, 1024, 2048, 8192, 16384, 32768}
    page = size if known else DEFAULT_PAGE
    return DamagedFile(file, page, -(-path.stat().st_size // page))


def _local_bytes(size: int, usable: int) -> int:
    """Bytes of a payload in its leaf page, as the file format has it."""
    most = usable - 35
    if size <= most:
        return size
    least = (usable - 12) * 32 // 255 - 23
    local = least + (size - least) % (usable - 4)
    return local if local <= most else least


def _columns(payload: bytes) -> list[bytes | str | int | None]:
    end, at = _varint(payload, 0)
    types = list[int]()
    while at < min(end, len(payload)):
        kind, at = _varint(payload, at)
        types.append(kind)
    if at != end:
        raise NoRowError("the row's header is not whole")
    columns = list[bytes | str | int | None]()
    for kind in types:
        size = _FIXED.get(kind, (kind - FIRST_SIZED) // 2)
        if kind in {10, 11} or at + size > len(payload):
            raise NoRowError("the row is not whole")
        columns.append(_column(kind, payload[at : at + size]))
        at += size
    return columns


def _column(kind: int, content: bytes) -> bytes | str | int | None:
    if kind == 0:
        return None
    if kind < FIRST_SIZED:
        return kind - 8 if kind in {8, 9} else int.from_bytes(content, "big", signed=True)
    return content.decode("utf-8", "backslashreplace") if kind % 2 else content


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(at, at + 8):
        value = value << 7 | data[index] & ~MORE
        if data[index] < MORE:
            return value, index + 1
    return value << 8 | data[at + 8], at + 9
