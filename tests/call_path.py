"""Counts the files that one piece of work passes through: what a reader has to open to follow it."""

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

SERVICES = "rollmill_"
TEST_KIT = ("rollmill", "testing")


@dataclass
class CallPath:
    """Set ``passed`` to no longer record: the work has passed the point up to which it is counted."""

    paths: set[str] = field(default_factory=set)
    passed: bool = False

    def files(self) -> list[str]:
        """The files of the packages `rollmill` and `rollmill_*`, without the test kit, from the package's name on."""
        return sorted({"/".join(parts) for parts in map(_parts_in_package, self.paths) if parts})

    def record(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        # The bodies of modules and classes run when they are imported: they are no part of the work.
        if event == "call" and not self.passed and code.co_flags & inspect.CO_OPTIMIZED:
            self.paths.add(code.co_filename)


@contextmanager
def recorded_call_path() -> Iterator[CallPath]:
    """Inside, every Python function that is entered, or resumed, here or in a thread started inside, is recorded."""
    path = CallPath()
    before = sys.getprofile()
    threading.setprofile(path.record)
    sys.setprofile(path.record)
    try:
        yield path
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def _parts_in_package(path: str) -> tuple[str, ...]:
    """The path from its package on; empty: it is not one of ours."""
    parts = Path(path).parts
    starts = [place for place, part in enumerate(parts) if part == "rollmill" or part.startswith(SERVICES)]
    packages = [place for place in starts if (Path(*parts[: place + 1]) / "__init__.py").is_file()]
    found = parts[packages[0] :] if packages else ()
    return () if found[: len(TEST_KIT)] == TEST_KIT else found
