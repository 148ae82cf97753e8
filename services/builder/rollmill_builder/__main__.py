"""``python -m rollmill_builder``: run the builder until SIGTERM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.runtime.program import main

if TYPE_CHECKING:
    from rollmill.runtime.app import Service


def _service() -> Service:
    from rollmill.settings import load  # noqa: PLC0415
    from rollmill_builder.app import build  # noqa: PLC0415  # comes with an extra
    from rollmill_builder.settings import BuilderSettings  # noqa: PLC0415

    return build(load(BuilderSettings))


if __name__ == "__main__":
    main("builder", _service)
