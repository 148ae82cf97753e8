"""Which faults a seed brings, and when. Pure: the same seed, the same plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from chaos.mutations import Mutation
from chaos.stack import CLIENTS, SERVICES, STAGES, TRAINER
from rollmill.runtime.failpoints import Failpoint


class Kind(StrEnum):
    KILL = "kill"
    """SIGKILL at a random time."""
    FAILPOINT = "failpoint"
    """SIGKILL at a named place."""
    DRAIN = "drain"
    """SIGTERM, and a new start."""
    TWINS = "twins"
    """Two processes of the same tasks."""
    PAUSE = "pause"
    """SIGSTOP for longer than the transaction timeout, alone."""
    ZOMBIE = "zombie"
    """The same, while a successor takes over."""
    BROKER_STOP = "broker_stop"
    BROKER_KILL = "broker_kill"
    CUT = "cut"
    """The network between one client and the broker."""
    DELAY = "delay"
    SWALLOW = "swallow"
    """Connections stay, and nothing passes."""
    REFUSAL = "refusal"
    """The log refuses records for a moment, for good as far as a client can tell."""
    CLOCK = "clock"
    """All clocks jump and, later, jump back."""
    DISK_FULL = "disk_full"


@dataclass(frozen=True)
class Fault:
    """``target``: a client's name, or empty where all are hit. Seconds."""

    kind: Kind
    target: str
    after: float
    """Since the recovery from the one before."""
    hold: float = 0.0
    amount: float = 0.0
    """Of a delay or a jump, in seconds."""
    place: Failpoint | None = None
    passes: int = 1

    def __str__(self) -> str:
        where = f" {self.place}@{self.passes}" if self.place else ""
        return f"{self.kind}{' ' + self.target if self.target else ''}{where}"


STAGE_PLACES = tuple(place for place in Failpoint if place.startswith(("restore.", "transaction.")))
PLACES: dict[str, tuple[Failpoint, ...]] = {
    "capture": (Failpoint.CAPTURE_BEFORE_ACKNOWLEDGEMENT, Failpoint.CAPTURE_AFTER_ACKNOWLEDGEMENT),
    "evaluator": (Failpoint.EVALUATOR_BEFORE_PUBLISH, Failpoint.EVALUATOR_AFTER_PUBLISH),
    TRAINER: (Failpoint.TRAINER_BEFORE_ACK, Failpoint.TRAINER_AFTER_ACK, Failpoint.TRANSACTION_BEFORE_COMMIT),
    **dict.fromkeys(STAGES, STAGE_PLACES),
}
ONCE = (Failpoint.RESTORE_CLAIMED, Failpoint.RESTORE_READ, Failpoint.TRAINER_BEFORE_ACK, Failpoint.TRAINER_AFTER_ACK)
"""Passed seldom: only an early pass is sure to come."""
PER_RECORD = 40
TARGETS: dict[Kind, Sequence[str]] = {
    Kind.KILL: CLIENTS,
    Kind.FAILPOINT: CLIENTS,
    Kind.DRAIN: SERVICES,
    Kind.TWINS: STAGES,
    Kind.PAUSE: CLIENTS,
    Kind.ZOMBIE: STAGES,
    Kind.CUT: CLIENTS,
    Kind.DELAY: CLIENTS,
    Kind.SWALLOW: CLIENTS,
}
PAUSE_SECONDS = 12.0
"""Above the transaction timeout of the stack."""
SLOW = frozenset({Kind.PAUSE, Kind.ZOMBIE, Kind.SWALLOW, Kind.TWINS, Kind.DISK_FULL})
OFTEN = (Kind.KILL, Kind.FAILPOINT, Kind.FAILPOINT)
"""In every plan."""


def plan(seed: int, count: int, kinds: Sequence[Kind]) -> tuple[Fault, ...]:
    """``count`` faults: kills and failpoints, and others in turn, so that a row of seeds has all kinds."""
    rng = random.Random(f"plan/{seed}")
    others = [kind for kind in kinds if kind not in OFTEN]
    first = seed * max(0, count - len(OFTEN))
    wanted = [others[(first + number) % len(others)] for number in range(count - len(OFTEN))] if others else []
    chosen = [*OFTEN[:count], *wanted]
    rng.shuffle(chosen)
    return tuple(_fault(kind, rng) for kind in chosen)


def mutation_plan(mutation: Mutation) -> tuple[Fault, ...]:
    """What has to bring this damage to light."""
    if mutation is Mutation.UNAWAITED_SENDS:
        return (Fault(Kind.REFUSAL, "", after=4.0, hold=3.0),)
    if mutation is Mutation.NO_CHANGELOG:
        return tuple(Fault(Kind.KILL, target, after=4.0) for target in ("builder-0", "batcher"))
    return (Fault(Kind.TWINS, "builder-0", after=4.0, hold=3.0),)


def _fault(kind: Kind, rng: random.Random) -> Fault:
    target = rng.choice(TARGETS[kind]) if kind in TARGETS else ""
    after = rng.uniform(0.5, 3.0)
    if kind is Kind.FAILPOINT:
        place = rng.choice(PLACES[target])
        return Fault(kind, target, after, place=place, passes=_pass(place, rng))
    if kind in {Kind.PAUSE, Kind.ZOMBIE}:
        return Fault(kind, target, after, hold=PAUSE_SECONDS)
    if kind is Kind.CLOCK:
        return Fault(kind, target, after, hold=rng.uniform(2, 5), amount=rng.choice((-1, 1)) * rng.uniform(5, 300))
    if kind is Kind.DELAY:
        return Fault(kind, target, after, hold=rng.uniform(4, 8), amount=rng.uniform(0.02, 0.4))
    if kind in {Kind.KILL, Kind.DRAIN}:
        return Fault(kind, target, after)
    holds = {Kind.SWALLOW: (6, 14), Kind.CUT: (1, 8), Kind.TWINS: (2, 4), Kind.REFUSAL: (1, 2)}
    return Fault(kind, target, after, hold=rng.uniform(*holds.get(kind, (0.5, 3))))


def _pass(place: Failpoint, rng: random.Random) -> int:
    if place in ONCE:
        return rng.randint(1, 2)
    return rng.randint(1, PER_RECORD if place is Failpoint.TRANSACTION_BETWEEN_SENDS else 6)
