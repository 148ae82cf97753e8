"""The group scorer ``majority``: the answer of most rollouts counts as right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import orjson

from rollmill.models import Trajectory
from rollmill.strategies import BaseGroupScorer


class Majority(BaseGroupScorer):
    """1.0 for the answer that more rollouts give than any other, 0.0 for every other answer (self-consistency as a
    reward, as in test-time reinforcement learning, Zuo et al. 2025).

    The answer is the session's output, or its ``field`` where that is an object; texts are compared without white
    space around them. A rollout without an answer is not graded; where two answers are equally frequent, none is.
    """

    def __init__(self, field: str | None = None) -> None:
        self._field = field

    def score(self, members: Sequence[Trajectory]) -> list[float | None]:
        answers = [self._answer(member) for member in members]
        counts = Counter(answer for answer in answers if answer is not None)
        most = max(counts.values(), default=0)
        winners = [answer for answer, count in counts.items() if count == most]
        if len(winners) != 1:
            return [None for _ in members]
        return [None if answer is None else float(answer == winners[0]) for answer in answers]

    def _answer(self, member: Trajectory) -> bytes | None:
        """Equal answers give equal bytes."""
        value = None if member.output is None else orjson.loads(member.output)
        if self._field is not None:
            value = value.get(self._field) if isinstance(value, dict) else None
        value = value.strip() if isinstance(value, str) else value
        return None if value is None else orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
