"""The demo's grader, named ``relay.evaluator:RelayEvaluator`` in the sessions' spec. It needs no torch."""

from collections.abc import Iterator
from itertools import chain

from relay.sabotage import Sabotage, spoiled_reward
from relay.task import reply_text, reward
from rollmill.models import EvalResult, Trace, Trajectory
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext


class RelayEvaluator(BaseTrajectoryEvaluator):
    """Reward = the share of right turns, read from the sampled tokens; a turn that never happened is wrong.

    ``digits``: what the session relays, one per turn. A trajectory without any turn is not graded (``no_turns``).
    """

    def __init__(self, digits: str, sabotage: str = Sabotage.NONE) -> None:
        if not digits.isdigit():
            raise ValueError(f"digits are expected, not {digits!r}")
        self._digits = digits
        self._sabotage = Sabotage(sabotage)

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:  # noqa: ARG002  # grading takes no time
        replies = list(chain.from_iterable(map(_replies, trajectory.traces)))
        if not replies:
            return EvalResult(not_graded="no_turns")
        return EvalResult(outcome_reward=spoiled_reward(reward(replies, self._digits), self._sabotage))


def _replies(trace: Trace) -> Iterator[str]:
    """What the model said in each turn, as an agent read it."""
    return (reply_text(trace.response_ids[turn.start : turn.stop].tolist()) for turn in trace.turns)
