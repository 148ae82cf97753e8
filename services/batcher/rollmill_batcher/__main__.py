"""``python -m rollmill_batcher``: run the batcher until SIGTERM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.runtime.program import main

if TYPE_CHECKING:
    from rollmill.runtime.app import Service


def _service() -> Service:
    from rollmill.settings import load  # noqa: PLC0415
    from rollmill_batcher.app import build  # noqa: PLC0415  # comes with an extra
    from rollmill_batcher.settings import BatcherSettings  # noqa: PLC0415

    return build(load(BatcherSettings))


if __name__ == "__main__":
    main("batcher", _service)
