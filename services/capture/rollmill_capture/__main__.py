"""``python -m rollmill_capture``: run the capture until SIGTERM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.runtime.program import main

if TYPE_CHECKING:
    from rollmill.runtime.app import Service


def _service() -> Service:
    from rollmill.settings import load  # noqa: PLC0415
    from rollmill_capture.app import build  # noqa: PLC0415  # comes with an extra
    from rollmill_capture.settings import CaptureSettings  # noqa: PLC0415

    return build(load(CaptureSettings))


if __name__ == "__main__":
    main("capture", _service)
