"""How far the run is: next step, newest policy, acknowledgements. Small, so every change replaces the whole value."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt

from rollmill.models import (
    EndOfStream,
    EventTime,
    PolicyAnnouncement,
    PolicyVersion,
    Record,
    Rewound,
    StepAcknowledged,
    StepsReturned,
)
from rollmill_batcher.groups.staleness import PolicyClock


class Acknowledgements(Record):
    """Steps that ranks have finished, in order. A step is acknowledged once all ranks of the trainer have."""

    world_size: PositiveInt = 1
    """Of the trainer that reported last; it divides the batcher's."""
    base: NonNegativeInt = 0
    """Next step of a rank that has reported nothing since the world size changed."""
    next_steps: dict[int, int] = Field(default_factory=dict)
    """Next step by rank."""

    @property
    def acknowledged(self) -> int:
        """Number of steps that every rank has finished."""
        return min(self.next_steps.get(rank, self.base) for rank in range(self.world_size))

    def with_acknowledgement(self, event: StepAcknowledged) -> Acknowledgements:
        known = self
        if event.world_size != self.world_size:
            known = Acknowledgements(world_size=event.world_size, base=self.acknowledged)
        reached = max(known.next_steps.get(event.rank, known.base), event.step + 1)
        return known._with_next_step(event.rank, reached)

    def rewound(self, event: Rewound) -> Acknowledgements:
        """Steps from ``event.next_step`` on are open again, for the rank that went back or for all (rule A4)."""
        if event.rank is not None:
            reached = self.next_steps.get(event.rank, self.base)
            return self._with_next_step(event.rank, min(reached, event.next_step))
        return self.replace(
            base=min(self.base, event.next_step),
            next_steps={rank: min(step, event.next_step) for rank, step in self.next_steps.items()},
        )

    def _with_next_step(self, rank: int, next_step: int) -> Acknowledgements:
        return self.replace(next_steps=dict(sorted({**self.next_steps, rank: next_step}.items())))


class RunProgress(Record):
    """The value of the state key ``progress``."""

    run: str = ""
    """Name of the run; empty before its first cut."""
    next_step: NonNegativeInt = 0
    sequence: NonNegativeInt = 0
    """Of the next cut."""
    policy_version: PolicyVersion = PolicyVersion()
    forks: dict[int, int] = Field(default_factory=dict)
    """See `PolicyClock.forks`."""
    acks: Acknowledgements = Acknowledgements()
    end_of_stream: bool = False
    now: EventTime = 0.0
    """Time of the last cut."""
    last_step_at: EventTime = 0.0
    """Time of the last cut that made a step."""
    kept_from: NonNegativeInt = 0
    """First step that still has its groups in the state."""
    placement: NonNegativeInt = 0
    """How often steps were returned."""
    world_size: PositiveInt | None = None
    """Since the last return; None is that of the settings."""
    answered: str | None = None
    """Request id of the last return."""

    @property
    def queued_steps(self) -> int:
        """Steps cut and not yet acknowledged."""
        return self.next_step - self.acks.acknowledged

    @property
    def clock(self) -> PolicyClock:
        return PolicyClock(self.policy_version, self.queued_steps, self.forks)

    @property
    def announced(self) -> PolicyVersion | None:
        """The newest announced version; None before the first."""
        return self.policy_version if self.policy_version != PolicyVersion() or self.forks else None

    def with_announcement(self, announcement: PolicyAnnouncement) -> RunProgress:
        """With the newest version by (epoch, version), in whatever order announcements come."""
        forks, epoch = dict(self.forks), announcement.version.epoch
        if announcement.resumed_from is not None:
            forks[epoch] = min(forks.get(epoch, announcement.resumed_from), announcement.resumed_from)
        newest = max(self.policy_version, announcement.version)
        return self.replace(policy_version=newest, forks=dict(sorted(forks.items())))

    def resharded(self, event: StepsReturned, next_step: int) -> RunProgress:
        """After a return: no rank of the new world has acknowledged anything from ``next_step`` on."""
        return self.replace(
            acks=Acknowledgements(world_size=event.world_size, base=next_step),
            placement=self.placement + 1,
            world_size=event.world_size,
            answered=event.request_id,
        )

    def with_event(self, event: StepAcknowledged | Rewound | EndOfStream) -> RunProgress:
        """After an event of the trainer. A rewind means that the run continues, so it cancels an end of stream."""
        if isinstance(event, EndOfStream):
            return self.replace(end_of_stream=True)
        if isinstance(event, Rewound):
            return self.replace(acks=self.acks.rewound(event), end_of_stream=False)
        return self.replace(acks=self.acks.with_acknowledgement(event))
