"""``python -m rollmill_evaluator``: run the evaluator until SIGTERM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.runtime.program import main

if TYPE_CHECKING:
    from rollmill.runtime.app import Service


def _service() -> Service:
    from rollmill.settings import load  # noqa: PLC0415
    from rollmill_evaluator.app import build  # noqa: PLC0415  # comes with an extra
    from rollmill_evaluator.settings import EvaluatorSettings  # noqa: PLC0415

    return build(load(EvaluatorSettings))


if __name__ == "__main__":
    main("evaluator", _service)
