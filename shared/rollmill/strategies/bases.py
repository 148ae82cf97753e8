"""What a custom builder, evaluator or advantage strategy subclasses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rollmill.models import CompletionRecord, CompletionSession, EvalResult, Trajectory
from rollmill.strategies.sandbox import NoSandbox, Sandbox
from rollmill.strategies.services import ExternalService, ResourceClass

S = TypeVar("S")


class BaseTrajectoryBuilder(ABC):
    """Turns the calls of one session into traces. Constructed once per session as ``Class(**spec.config)``.

    ``build`` must be a pure function of the session: no clock, no randomness, no I/O (rule E3). It never sets
    rewards. Sampled tokens that no trace trains belong into ``excluded`` with a reason; what is left unaccounted
    is excluded by the service with reason ``builder_dropped``, so that the ledger balances.
    """

    @abstractmethod
    def build(self, session: CompletionSession) -> Trajectory:
        """The trajectory of ``session``; `rollmill.strategies.trajectory_of` fills the identity fields."""


class BaseIncrementalBuilder(BaseTrajectoryBuilder, Generic[S]):
    """A builder that gets the records of a session as they come, for work that should not wait for the end.

    It keeps nothing in itself: its state is what `start` and `add` return, and a new owner of the session gets it by
    adding the same records again, in the same order. Records come in the order of acceptance, which is not that of
    their starts: sort in `finish` by (``started_at``, ``completion_id``) where the order matters. A record's request
    is reduced to messages and tools. State is memory that no budget counts. All three methods must be pure.
    """

    @abstractmethod
    def start(self) -> S:
        """The state of a session without records."""

    @abstractmethod
    def add(self, state: S, record: CompletionRecord) -> S:
        """The state with one more record; ``state`` itself must stay as it is."""

    @abstractmethod
    def finish(self, state: S, session: CompletionSession) -> Trajectory:
        """The trajectory; ``session`` says how it ended and holds no records."""

    def build(self, session: CompletionSession) -> Trajectory:
        state = self.start()
        for record in session.completions:
            state = self.add(state, record)
        return self.finish(state, session.model_copy(update={"completions": ()}))


NO_SANDBOX = NoSandbox("this evaluator runs without a sandbox")


@dataclass(frozen=True)
class EvaluationContext:
    """What an evaluator may use beside the trajectory."""

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


class BaseTrajectoryEvaluator(ABC):
    """Grades one trajectory. Constructed per request as ``Class(**spec.config)``; may run code and call services.

    Infrastructure failures are ``EvalResult(not_graded=reason)`` or an exception, never a number.
    """

    resource_class: ResourceClass = ResourceClass.CUSTOM
    """With which others it shares places and intake; an instance may have one of its own."""
    answered_here: ClassVar[bool] = True
    """False: the evaluator service says nothing, because somebody else will."""

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
        if len(members) < 2:  # noqa: PLR2004  # nobody to be compared with
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
