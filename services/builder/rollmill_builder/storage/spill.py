"""A local file for the bytes of idle sessions. It may be lost at any moment: the changelog is the truth."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from zlib import crc32

PAGE = 4096


class DamagedExtentError(OSError):
    """The file returned other bytes than were written."""


class Extent:
    """A range of a spill file. Its pages are free again once the last reference to it is gone."""

    __slots__ = ("_checksum", "_file", "_free", "offset", "pages", "size")

    def __init__(self, file: SpillFile, offset: int, data: bytes, free: Callable[[int, int], None]) -> None:
        self._file, self.offset, self.size, self._free = file, offset, len(data), free
        self._checksum = crc32(data)
        self.pages = _pages(self.size)

    def read(self) -> bytes:
        """Raises OSError, DamagedExtentError where the content is not what was written."""
        data = self._file.read(self.offset, self.size)
        if len(data) != self.size:
            raise DamagedExtentError(f"the file returned {len(data)} bytes of {self.size} that were written")
        if crc32(data) != self._checksum:
            raise DamagedExtentError(f"the file returned {self.size} bytes that are not those that were written")
        return data

    def __del__(self) -> None:
        self._free(self.offset, self.pages)


class SpillFile:
    """An unnamed temporary file in ``directory`` (None: the system's), of at most ``max_bytes`` bytes.

    It vanishes with the process, however that ends. Errors of the disk are raised as OSError.
    """

    def __init__(self, directory: Path | None, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._opened: FileIO | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}
        """Offsets of free extents by their number of pages."""
        self.used_bytes = 0
        """In whole pages."""

    def write(self, data: bytes) -> Extent | None:
        """Where ``data`` is stored; None: it does not fit into the file any more."""
        pages = _pages(len(data))
        offset = self._allocate(pages)
        if offset is None:
            return None
        self.used_bytes += pages * PAGE
        extent = Extent(self, offset, data, self._release)  # where the disk fails, its end gives the pages back
        self._write(offset, data)
        return extent

    def read(self, offset: int, size: int) -> bytes:
        file = self._file()
        file.seek(offset)
        data = file.read(size)
        while len(data) < size and (more := file.read(size - len(data))):
            data += more
        return data

    def close(self) -> None:
        """Nothing is read any more."""
        if self._opened is not None:
            self._opened.close()

    def __del__(self) -> None:
        self.close()

    def _write(self, offset: int, data: bytes) -> None:
        """All of it; a disk that becomes full takes a part first."""
        file, rest = self._file(), memoryview(data)
        file.seek(offset)
        while rest:
            rest = rest[file.write(rest) :]

    def _file(self) -> FileIO:
        """Without a buffer, so that an error of the disk is raised to who has written."""
        if self._opened is None:
            opened = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115  # as long as extents refer to it
            self._opened = opened
        return self._opened

    def _allocate(self, pages: int) -> int | None:
        free = self._free.get(pages)
        if free:
            return free.pop()
        if self._end + pages * PAGE > self._max_bytes:
            return None
        offset, self._end = self._end, self._end + pages * PAGE
        return offset

    def _release(self, offset: int, pages: int) -> None:
        self.used_bytes -= pages * PAGE
        self._free.setdefault(pages, []).append(offset)
        if not self.used_bytes and self._opened is not None and not self._opened.closed:
            self._opened.truncate(0)
            self._end = 0
            self._free.clear()


def _pages(size: int) -> int:
    """Pages of an extent for ``size`` bytes, in steps of a quarter: a session that grows can reuse others'."""
    pages = max(1, -(-size // PAGE))
    step = 1 << max(0, pages.bit_length() - 3)
    return -(-pages // step) * step
