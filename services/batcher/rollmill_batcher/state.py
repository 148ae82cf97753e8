"""What the batcher's state holds: groups, markers of closed groups, progress; and how a delta folds in.

Payloads: a group's delta is a trajectory in MessagePack, with its manifest (what is pending); the others are JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from rollmill.codec import JSON, decode, encode
from rollmill.models import Cut, EventTime, Identifier, Record, SessionSpec, Trace, Trajectory
from rollmill.runtime.stream import StateUpdate, StateView
from rollmill_batcher.groups.group import Group, GroupState
from rollmill_batcher.progress import Progress

PROGRESS = "progress"
GROUP = "group:"
DONE = "/done"
STEP = "step:"


class DoneGroup(Record):
    """Marker of a closed group: names late members, and knows repeats of those it has disposed of (rule S2)."""

    group_id: Identifier
    state: GroupState
    sequence: NonNegativeInt
    """Of the cut that closed it."""
    at: EventTime
    """Time of that cut."""
    sessions: tuple[tuple[Identifier, PositiveInt], ...]
    """(session, attempt) of all members whose tokens have found their end, sorted."""

    def knows(self, trajectory: Trajectory) -> bool:
        return (trajectory.session_id, trajectory.attempt) in self.sessions

    def with_late(self, trajectory: Trajectory) -> DoneGroup:
        return self.replace(sessions=tuple(sorted([*self.sessions, (trajectory.session_id, trajectory.attempt)])))


class CutStep(Record):
    """A step whose groups are held until all ranks have acknowledged it: it can be laid out anew (rule R4)."""

    cut: Cut
    forks: dict[int, int]
    content: str
    """Digest of what it trains, whatever the rank."""


Held = Group | DoneGroup | Progress | CutStep


def folded(key: str, value: Held | None, payload: bytes) -> Held:
    """The new value of ``key``. Deltas of a group may come in any order."""
    if key == PROGRESS:
        return _progress(payload)
    if key.endswith(DONE):
        return _done(payload)
    if key.startswith(STEP):
        return _cut_step(payload)
    member: Trajectory = decode(Trajectory, payload)
    group = value if isinstance(value, Group) else Group(member.group_id)
    return group.joined(member)


def member_delta(trajectory: Trajectory, *, outputs: bool = False) -> StateUpdate:
    kept = slim(trajectory, outputs=outputs)
    return StateUpdate(group_key(trajectory.group_id), encode(kept), manifest=trajectory.manifest)


def progress_delta(progress: Progress) -> StateUpdate:
    return StateUpdate(PROGRESS, encode(progress, JSON), replaces=True)


def done_delta(done: DoneGroup) -> StateUpdate:
    return StateUpdate(done_key(done.group_id), encode(done, JSON), replaces=True)


def step_delta(step: CutStep) -> StateUpdate:
    return StateUpdate(step_key(step.cut.step), encode(step, JSON), replaces=True)


def step_key(number: int) -> str:
    return f"{STEP}{number:012d}"


def step_of(state: StateView[Held], number: int) -> CutStep | None:
    value = state.get(step_key(number))
    return value if isinstance(value, CutStep) else None


def step_ends(state: StateView[Held], numbers: Iterable[int]) -> tuple[str, ...]:
    """Keys of steps and of their groups."""
    steps = filter(None, (step_of(state, number) for number in numbers))
    return tuple(key for each in steps for key in (step_key(each.cut.step), *map(group_key, each.cut.groups)))


def step_members(state: StateView[Held], numbers: Iterable[int]) -> Iterator[Trajectory]:
    """The rollouts of steps that are still held."""
    steps = filter(None, (step_of(state, number) for number in numbers))
    held = filter(None, (group_of(state, group_id) for step in steps for group_id in step.cut.groups))
    return (member for group in held for member in group.members)


def group_key(group_id: str) -> str:
    return f"{GROUP}{group_id}"


def done_key(group_id: str) -> str:
    return f"{GROUP}{group_id}{DONE}"


def progress_of(state: StateView[Held]) -> Progress:
    value = state.get(PROGRESS)
    return value if isinstance(value, Progress) else Progress()


def group_of(state: StateView[Held], group_id: str) -> Group | None:
    value = state.get(group_key(group_id))
    return value if isinstance(value, Group) else None


def done_of(state: StateView[Held], group_id: str) -> DoneGroup | None:
    value = state.get(done_key(group_id))
    return value if isinstance(value, DoneGroup) else None


def groups(state: StateView[Held]) -> Iterator[Group]:
    """Those that wait, without those of the steps that are held."""
    progress = progress_of(state)
    steps = filter(None, (step_of(state, number) for number in range(progress.kept_from, progress.next_step)))
    taken = {group_id for step in steps for group_id in step.cut.groups}
    return (value for _, value in state.items() if isinstance(value, Group) and value.group_id not in taken)


def done_groups(state: StateView[Held]) -> Iterator[DoneGroup]:
    return (value for _, value in state.items() if isinstance(value, DoneGroup))


def slim(trajectory: Trajectory, *, outputs: bool = False) -> Trajectory:
    """Only what a step needs: ids, masks, log-probs, versions, turns and rewards; of texts the output, if at all."""
    spec = trajectory.spec
    kept = SessionSpec(
        group_id=spec.group_id,
        group_size=spec.group_size,
        policy=spec.policy,
        task_id=spec.task_id,
        dataset=spec.dataset,
    )
    reward = trajectory.outcome_reward
    return trajectory.model_copy(
        update={
            "spec": kept,
            "error": None,
            "output": trajectory.output if outputs else None,
            "excluded": (),
            "metadata": {},
            "evaluation": None if reward is None else {"outcome_reward": reward},
            "traces": tuple(map(_slim_trace, trajectory.traces)),
        }
    )


def _slim_trace(trace: Trace) -> Trace:
    kept = {} if trace.fingerprint is None else {"fingerprint": trace.fingerprint}
    gone: dict[str, Any] = {"prompt_messages": None, "response_messages": None, "tools": None, "metadata": kept}
    return trace.model_copy(update=gone)


def _progress(payload: bytes) -> Progress:
    progress: Progress = decode(Progress, payload)
    return progress


def _cut_step(payload: bytes) -> CutStep:
    step: CutStep = decode(CutStep, payload)
    return step


def _done(payload: bytes) -> DoneGroup:
    done: DoneGroup = decode(DoneGroup, payload)
    return done
