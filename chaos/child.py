"""Runs a service unchanged, but with a clock that can be shifted, failpoints for one start, and, to check the harness
itself, a mutation.

    python -m chaos.child DIRECTORY NAME MODULE [ARGUMENT …]
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from chaos.clock import CLOCK_FILE, ShiftedClock
from chaos.mutations import MUTATION, apply

FAILPOINTS = "ROLLMILL_FAILPOINTS"


def failpoints_file(directory: Path, name: str) -> Path:
    """The file with the failpoints of a service's next start; that start deletes it."""
    return directory / f"{name}.failpoints"


def main(directory: Path, name: str, module: str, *arguments: str) -> None:
    _arm(failpoints_file(directory, name))
    if module != "chaos.trainer":
        import rollmill.runtime.app  # noqa: PLC0415  # after the failpoints are in the environment

        clock = ShiftedClock(directory / CLOCK_FILE)
        vars(rollmill.runtime.app)["SystemClock"] = lambda: clock
    if mutation := os.environ.get(MUTATION):
        apply(mutation)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _arm(file: Path) -> None:
    if file.exists():
        os.environ[FAILPOINTS] = file.read_text()
        file.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
