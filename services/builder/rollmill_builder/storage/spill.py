"""A local file for the bytes of idle sessions. It may be lost at any moment: the changelog is the truth."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

PAGE = 4096


class Extent:
    """A range of a spill file. Its pages are free again once the last reference to it is gone."""

    __slots__ = ("_file", "_free", "offset", "pages", "size")

    def __init__(self, file: SpillFile, offset: int, size: int, free: Callable[[int, int], None]) -> None:
        self._file, self.offset, self.size, self._free = file, offset, size, free
        self.pages = _pages(size)

    def read(self) -> bytes:
        return self._file.read(self.offset, self.size)

    def __del__(self) -> None:
        self._free(self.offset, self.pages)


class SpillFile:
    """An unnamed temporary file in ``directory`` (None: the system's), of at most ``max_bytes`` bytes.

    It vanishes with the process, however that ends. Errors of the disk are raised as OSError.
    """

    def __init__(self, directory: Path | None, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._opened: IO[bytes] | None = None
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
        file = self._file()
        file.seek(offset)
        file.write(data)
        self.used_bytes += pages * PAGE
        return Extent(self, offset, len(data), self._release)

    def read(self, offset: int, size: int) -> bytes:
        file = self._file()
        file.seek(offset)
        return file.read(size)

    def close(self) -> None:
        """Nothing is read any more."""
        if self._opened is not None:
            self._opened.close()

    def __del__(self) -> None:
        self.close()

    def _file(self) -> IO[bytes]:
        if self._opened is None:
            self._opened = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115  # open while extents refer to it
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
