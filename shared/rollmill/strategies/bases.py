"""Base classes of builders, evaluators, group scorers and advantages."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rollmill.models import (
    CompletionRecord,
    CompletionSession,
    EvalResult,
    ExcludedUnits,
    Trace,
    Trajectory,
    TrajectoryStatus,
)
from rollmill.strategies.maxima import ResourceRequest
from rollmill.strategies.sandbox import NoSandbox, Sandbox
from rollmill.strategies.services import ExternalService, ResourceClass

S = TypeVar("S")


class BaseTrajectoryBuilder(ABC):
    """Turns the calls of one session into traces. Constructed once per session as ``Class(**spec.config)``.

    ``build`` must be a pure function of the session: no clock, no randomness, no I/O (rule E3). It never sets
    rewards. Sampled tokens that no trace trains go into ``excluded`` with a reason; tokens that are in neither
    are excluded by the service with reason ``builder_dropped``, so that the ledger balances.
    """

    @abstractmethod
    def build(self, session: CompletionSession) -> Trajectory:
        """The trajectory of ``session``; `rollmill.strategies.trajectory_of` fills the identity fields."""


def trajectory_of(
    session: CompletionSession,
    traces: Iterable[Trace] = (),
    *,
    excluded: Iterable[ExcludedUnits] = (),
    status: TrajectoryStatus | None = None,
    error: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Trajectory:
    """The trajectory of ``session`` with these traces; ``status`` and ``error`` default to the session's own."""
    return Trajectory(
        session_id=session.session_id,
        attempt=session.attempt,
        status=status or session.status,
        spec=session.spec,
        opened_at=session.opened_at,
        closed_at=session.closed_at,
        error=session.error if error is None else error,
        output=session.output,
        reported_reward=session.reward,
        traces=tuple(traces),
        excluded=tuple(excluded),
        metadata=dict(metadata or {}),
    )


class BaseIncrementalBuilder(BaseTrajectoryBuilder, Generic[S]):
    """A builder that gets the records of a session as they come, for work that should not wait for the end.

    The object itself keeps nothing: the state is what `start` and `add` return, and a new owner of the session gets it
    by adding the same records again, in the same order. Records come in the order of acceptance, which is not that of
    their starts: sort in `finish` by (``started_at``, ``completion_id``) where the order matters. A record's request is
    reduced to messages and tools. State is memory that no budget counts. All three methods must be pure.
    """

    @abstractmethod
    def start(self) -> S:
        """The state of a session without records."""

    @abstractmethod
    def add(self, state: S, record: CompletionRecord) -> S:
        """The state with one more record; ``state`` itself must stay as it is."""

    @abstractmethod
    def finish(self, state: S, session: CompletionSession) -> Trajectory:
        """The trajectory; ``session`` holds how it ended, and no records."""

    def build(self, session: CompletionSession) -> Trajectory:
        state = self.start()
        for record in session.completions:
            state = self.add(state, record)
        return self.finish(state, session.model_copy(update={"completions": ()}))


NO_SANDBOX = NoSandbox("this evaluator runs without a sandbox")


@dataclass(frozen=True)
class EvaluationContext:
    """What an evaluator may use besides the trajectory."""

    deadline_seconds: float
    """Time left to answer, in seconds."""
    sandbox: Sandbox = NO_SANDBOX
    """Runs commands on this machine's own system."""
    containers: Sandbox = NO_SANDBOX
    """Runs commands in a container of a job's ``image``."""
    sources: Path | None = None
    """The folder below which configs name repositories and archives; None: they can name none."""
    services: Mapping[str, ExternalService] = field(default_factory=dict)
    """Services outside that configs can name."""
    any_url: bool = True
    """False: configs can name services and no URL of their own."""
    networks: tuple[str, ...] = ()
    """Networks beside the public ones, such as ``10.1.0.0/16``, in which such a URL may be."""


class BaseTrajectoryEvaluator(ABC):
    """Grades one trajectory. Constructed per request as ``Class(**spec.config)``; may run code and call services.

    Infrastructure failures are ``EvalResult(not_graded=reason)`` or an exception, never a number.
    """

    resource_class: ResourceClass = ResourceClass.CUSTOM
    """Evaluators of one class share consumer and concurrency; an instance may set its own."""
    answered_here: ClassVar[bool] = True
    """False: the evaluator service writes no evaluation, because another program will."""

    def requested_resources(self) -> Iterable[ResourceRequest]:
        """What its config asks for, where an operator's maximum bounds it; a session that asks for more is refused."""
        return ()

    @abstractmethod
    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:
        """The grade of ``trajectory``; each trace may be graded on its own with ``trace_rewards``."""


class BaseGroupScorer(ABC):
    """Grades all rollouts of a group at once, each against the others. Constructed once as ``Class(**config)``.

    It runs in the batcher when a group is complete, or has waited long enough, and must be pure: no clock, no
    randomness, no I/O (rule B2). A comparison that asks a model belongs into an evaluator.
    """

    @abstractmethod
    def score(self, members: Sequence[Trajectory]) -> Sequence[float | None]:
        """A reward for each of ``members``, which are sorted by session id; None leaves one ungraded.

        A member has its output, status, ids, log-probs and the reward of its own evaluators, and no messages.
        """


class BasePairwiseScorer(BaseGroupScorer):
    """The reward of a rollout is its mean score against each of the others."""

    @abstractmethod
    def compare(self, one: Trajectory, other: Trajectory) -> float:
        """What ``one`` gets against ``other``, such as 1 won, 0 lost, 1/2 neither."""

    def score(self, members: Sequence[Trajectory]) -> Sequence[float | None]:
        if len(members) < 2:  # noqa: PLR2004  # a comparison needs two
            return [None for _ in members]
        return [
            math.fsum(self.compare(one, other) for other in members if other is not one) / (len(members) - 1)
            for one in members
        ]


class BaseAdvantage(ABC):
    """Advantages of the rollouts of one group. A rollout counts once, whatever its number of traces (rule A1)."""

    min_rollouts: ClassVar[int] = 2
    """A group with fewer graded rollouts has no baseline and is excluded as ``group_too_small``."""

    @abstractmethod
    def compute(self, rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Advantages [n] float64 of ``rewards`` [n] float64, one per graded rollout of the group, sorted by id."""

    def over_step(
        self,
        advantages: npt.NDArray[np.float64],
        rewards: npt.NDArray[np.float64],  # noqa: ARG002  # for strategies that scale by the whole step
    ) -> npt.NDArray[np.float64]:
        """Advantages [m] of all graded rollouts of a step, once every group's are computed; unchanged by default."""
        return advantages
