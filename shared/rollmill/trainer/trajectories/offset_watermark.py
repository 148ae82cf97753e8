"""Which records of a partition are finished, when they are finished out of order. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from rollmill.errors import InvalidInputError
from rollmill.models import Record, dump_json

MAX_METADATA = 4000
"""Bytes of a commit's metadata; the broker refuses more than 4,096."""


class TooManyGapsError(InvalidInputError):
    """More offsets are finished above an open one than the commit's metadata has room for."""


class OffsetWatermark(Record):
    """Everything below ``next_offset`` is finished, and so is ``done``."""

    next_offset: int = 0
    done: tuple[int, ...] = ()
    """Finished offsets above, ascending."""
    reached: int = 0
    """Below it records may have been finished by a lineage that was abandoned."""

    def finishing(self, offsets: Iterable[int], handed_out: Iterable[int], position: int) -> Self:
        """The watermark with more finished offsets. ``handed_out``: offsets read and not finished before; ``position``:
        next to be read.

        Offsets have gaps, so the boundary moves to the first one that is open, else to the position.
        """
        finished = set(offsets)
        boundary = min((offset for offset in handed_out if offset not in finished), default=position)
        above = sorted(offset for offset in {*self.done, *finished} if offset >= boundary)
        return self.replace(next_offset=boundary, done=tuple(above))

    def back_to(self, checkpoint: Self) -> Self:
        """The checkpoint's watermark, which also keeps how far this one was."""
        return checkpoint.replace(reached=max(self.reached, checkpoint.reached, self.next_offset, *self._after_done()))

    def _after_done(self) -> list[int]:
        return [offset + 1 for offset in self.done]

    def metadata(self) -> str:
        """For the commit. Raises TooManyGapsError where too many are finished above an open one."""
        text = dump_json({"done": self.done, "reached": self.reached}).decode()
        if len(text) > MAX_METADATA:
            raise TooManyGapsError(
                f"{len(self.done)} trajectories are finished above offset {self.next_offset}, which is open: finish "
                "older ones first"
            )
        return text
