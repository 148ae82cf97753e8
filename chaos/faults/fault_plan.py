"""Which faults a run has, and when. Pure: the same seed gives the same plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from chaos.mutations import Mutation
from chaos.stack import CLIENTS, SERVICES, STAGES, TRAINER
from rollmill.runtime.failpoints import Failpoint


class FaultKind(StrEnum):
    KILL = "kill"
    """SIGKILL at a random time."""
    FAILPOINT = "failpoint"
    """SIGKILL at a failpoint."""
    DRAIN = "drain"
    """SIGTERM, then a new start."""
    TWINS = "twins"
    """Two processes with the same tasks."""
    PAUSE = "pause"
    """SIGSTOP for longer than the transaction timeout."""
    ZOMBIE = "zombie"
    """The same, while a second process takes over."""
    BROKER_STOP = "broker_stop"
    BROKER_KILL = "broker_kill"
    CUT = "cut"
    """The network between one client and the broker."""
    DELAY = "delay"
    SWALLOW = "swallow"
    """Connections stay open, and no data passes."""
    REFUSAL = "refusal"
    """For a moment the broker refuses records as too large, which a client cannot retry."""
    CLOCK = "clock"
    """All clocks jump and later jump back."""
    DISK_FULL = "disk_full"


@dataclass(frozen=True)
class Fault:
    """``target``: a client's name, or empty where the fault concerns all. Times are in seconds."""

    kind: FaultKind
    target: str
    after: float
    """Since the recovery from the previous fault."""
    hold: float = 0.0
    amount: float = 0.0
    """Of a delay or a jump, in seconds."""
    failpoint: Failpoint | None = None
    passes: int = 1
    """The failpoint acts when it is reached this many times."""

    def __str__(self) -> str:
        where = f" {self.failpoint}@{self.passes}" if self.failpoint else ""
        return f"{self.kind}{' ' + self.target if self.target else ''}{where}"


STAGE_FAILPOINTS = tuple(item for item in Failpoint if item.startswith(("restore.", "transaction.")))
FAILPOINTS: dict[str, tuple[Failpoint, ...]] = {
    "capture": (Failpoint.CAPTURE_BEFORE_ACKNOWLEDGEMENT, Failpoint.CAPTURE_AFTER_ACKNOWLEDGEMENT),
    "evaluator": (Failpoint.EVALUATOR_BEFORE_PUBLISH, Failpoint.EVALUATOR_AFTER_PUBLISH),
    TRAINER: (Failpoint.TRAINER_BEFORE_ACK, Failpoint.TRAINER_AFTER_ACK, Failpoint.TRANSACTION_BEFORE_COMMIT),
    **dict.fromkeys(STAGES, STAGE_FAILPOINTS),
}
RARELY_REACHED = (
    Failpoint.RESTORE_CLAIMED,
    Failpoint.RESTORE_READ,
    Failpoint.TRAINER_BEFORE_ACK,
    Failpoint.TRAINER_AFTER_ACK,
)
"""Reached rarely: only an early pass is certain to happen."""
PASSES_PER_RECORD = 40
"""The highest pass that is chosen at a failpoint that every record reaches."""
TARGETS: dict[FaultKind, Sequence[str]] = {
    FaultKind.KILL: CLIENTS,
    FaultKind.FAILPOINT: CLIENTS,
    FaultKind.DRAIN: SERVICES,
    FaultKind.TWINS: STAGES,
    FaultKind.PAUSE: CLIENTS,
    FaultKind.ZOMBIE: STAGES,
    FaultKind.CUT: CLIENTS,
    FaultKind.DELAY: CLIENTS,
    FaultKind.SWALLOW: CLIENTS,
}
PAUSE_SECONDS = 12.0
"""Above the transaction timeout of the stack."""
SLOW = frozenset({FaultKind.PAUSE, FaultKind.ZOMBIE, FaultKind.SWALLOW, FaultKind.TWINS, FaultKind.DISK_FULL})
ALWAYS = (FaultKind.KILL, FaultKind.FAILPOINT, FaultKind.FAILPOINT)
"""In every plan."""


def plan(seed: int, count: int, kinds: Sequence[FaultKind]) -> tuple[Fault, ...]:
    """``count`` faults: kills and failpoints, the other kinds in turn, so that consecutive seeds cover all kinds."""
    rng = random.Random(f"plan/{seed}")
    others = [kind for kind in kinds if kind not in ALWAYS]
    first = seed * max(0, count - len(ALWAYS))
    wanted = [others[(first + number) % len(others)] for number in range(count - len(ALWAYS))] if others else []
    chosen = [*ALWAYS[:count], *wanted]
    rng.shuffle(chosen)
    return tuple(_fault(kind, rng) for kind in chosen)


def mutation_plan(mutation: Mutation) -> tuple[Fault, ...]:
    """The faults that must expose this mutation."""
    if mutation is Mutation.UNAWAITED_SENDS:
        return (Fault(FaultKind.REFUSAL, "", after=4.0, hold=3.0),)
    if mutation is Mutation.NO_CHANGELOG:
        return tuple(Fault(FaultKind.KILL, target, after=4.0) for target in ("builder-0", "batcher"))
    return (Fault(FaultKind.TWINS, "builder-0", after=4.0, hold=3.0),)


def _fault(kind: FaultKind, rng: random.Random) -> Fault:
    target = rng.choice(TARGETS[kind]) if kind in TARGETS else ""
    after = rng.uniform(0.5, 3.0)
    if kind is FaultKind.FAILPOINT:
        failpoint = rng.choice(FAILPOINTS[target])
        return Fault(kind, target, after, failpoint=failpoint, passes=_pass(failpoint, rng))
    if kind in {FaultKind.PAUSE, FaultKind.ZOMBIE}:
        return Fault(kind, target, after, hold=PAUSE_SECONDS)
    if kind is FaultKind.CLOCK:
        return Fault(kind, target, after, hold=rng.uniform(2, 5), amount=rng.choice((-1, 1)) * rng.uniform(5, 300))
    if kind is FaultKind.DELAY:
        return Fault(kind, target, after, hold=rng.uniform(4, 8), amount=rng.uniform(0.02, 0.4))
    if kind in {FaultKind.KILL, FaultKind.DRAIN}:
        return Fault(kind, target, after)
    holds = {FaultKind.SWALLOW: (6, 14), FaultKind.CUT: (1, 8), FaultKind.TWINS: (2, 4), FaultKind.REFUSAL: (1, 2)}
    return Fault(kind, target, after, hold=rng.uniform(*holds.get(kind, (0.5, 3))))


def _pass(failpoint: Failpoint, rng: random.Random) -> int:
    if failpoint in RARELY_REACHED:
        return rng.randint(1, 2)
    return rng.randint(1, PASSES_PER_RECORD if failpoint is Failpoint.TRANSACTION_BETWEEN_SENDS else 6)
