"""``python -m rollmill_reward_merger``: run the reward-merger until SIGTERM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.runtime.program import main

if TYPE_CHECKING:
    from rollmill.runtime.app import Service


def _service() -> Service:
    from rollmill.settings import load  # noqa: PLC0415
    from rollmill_reward_merger.app import build  # noqa: PLC0415  # comes with an extra
    from rollmill_reward_merger.settings import RewardMergerSettings  # noqa: PLC0415

    return build(load(RewardMergerSettings))


if __name__ == "__main__":
    main("reward-merger", _service)
