"""The batcher's state: its keys, its values, and how an update changes a value.

``progress`` the run's progress, ``group:<id>`` a waiting group or one of a kept step, ``group:<id>/done`` the marker of
a closed group, ``step:<number>`` a step that is kept. The payload that updates a group is a trajectory in MessagePack,
with its manifest (what is pending); the others are JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from rollmill.codec import JSON, decode, encode
from rollmill.models import Cut, EventTime, Identifier, Record, SessionSpec, Trace, Trajectory
from rollmill.runtime.stream import StateUpdate, StateView
from rollmill_batcher.groups.group import GroupState, RolloutGroup
from rollmill_batcher.progress import RunProgress

PROGRESS = "progress"
GROUP = "group:"
DONE = "/done"
STEP = "step:"


class ClosedGroupMarker(Record):
    """Remembers a closed group, to recognise late members and repeats of those that were disposed of (rule S2)."""

    group_id: Identifier
    state: GroupState
    sequence: NonNegativeInt
    """Of the cut that closed it."""
    at: EventTime
    """Time of that cut."""
    sessions: tuple[tuple[Identifier, PositiveInt], ...]
    """(session, attempt) of all members with a disposition of their tokens, sorted."""

    def knows(self, trajectory: Trajectory) -> bool:
        return (trajectory.session_id, trajectory.attempt) in self.sessions

    def with_late(self, trajectory: Trajectory) -> ClosedGroupMarker:
        return self.replace(sessions=tuple(sorted([*self.sessions, (trajectory.session_id, trajectory.attempt)])))


class CutStep(Record):
    """A step that keeps its groups until all ranks have acknowledged it, so that it can be resharded (rule R4)."""

    cut: Cut
    forks: dict[int, int]
    content: str
    """Digest of what it trains, independent of the ranks."""


StateValue = RolloutGroup | ClosedGroupMarker | RunProgress | CutStep


def apply_update(key: str, value: StateValue | None, payload: bytes) -> StateValue:
    """The new value of ``key``. Updates of a group may come in any order."""
    if key == PROGRESS:
        return _decode_progress(payload)
    if key.endswith(DONE):
        return _decode_marker(payload)
    if key.startswith(STEP):
        return _decode_step(payload)
    member: Trajectory = decode(Trajectory, payload)
    group = value if isinstance(value, RolloutGroup) else RolloutGroup(member.group_id)
    return group.with_member(member)


def member_update(trajectory: Trajectory, *, outputs: bool = False) -> StateUpdate:
    kept = slim(trajectory, outputs=outputs)
    return StateUpdate(group_key(trajectory.group_id), encode(kept), manifest=trajectory.manifest)


def progress_update(progress: RunProgress) -> StateUpdate:
    return StateUpdate(PROGRESS, encode(progress, JSON), replaces=True)


def marker_update(marker: ClosedGroupMarker) -> StateUpdate:
    return StateUpdate(marker_key(marker.group_id), encode(marker, JSON), replaces=True)


def step_update(step: CutStep) -> StateUpdate:
    return StateUpdate(step_key(step.cut.step), encode(step, JSON), replaces=True)


def step_key(number: int) -> str:
    return f"{STEP}{number:012d}"


def group_key(group_id: str) -> str:
    return f"{GROUP}{group_id}"


def marker_key(group_id: str) -> str:
    return f"{GROUP}{group_id}{DONE}"


def progress_of(state: StateView[StateValue]) -> RunProgress:
    value = state.get(PROGRESS)
    return value if isinstance(value, RunProgress) else RunProgress()


def find_group(state: StateView[StateValue], group_id: str) -> RolloutGroup | None:
    value = state.get(group_key(group_id))
    return value if isinstance(value, RolloutGroup) else None


def find_marker(state: StateView[StateValue], group_id: str) -> ClosedGroupMarker | None:
    value = state.get(marker_key(group_id))
    return value if isinstance(value, ClosedGroupMarker) else None


def find_step(state: StateView[StateValue], number: int) -> CutStep | None:
    value = state.get(step_key(number))
    return value if isinstance(value, CutStep) else None


def waiting_groups(state: StateView[StateValue]) -> Iterator[RolloutGroup]:
    """All groups but those of kept steps."""
    progress = progress_of(state)
    steps = _kept_steps(state, range(progress.kept_from, progress.next_step))
    taken = {group_id for step in steps for group_id in step.cut.groups}
    return (value for _, value in state.items() if isinstance(value, RolloutGroup) and value.group_id not in taken)


def closed_group_markers(state: StateView[StateValue]) -> Iterator[ClosedGroupMarker]:
    return (value for _, value in state.items() if isinstance(value, ClosedGroupMarker))


def state_keys_of_steps(state: StateView[StateValue], numbers: Iterable[int]) -> tuple[str, ...]:
    """Keys of steps and of their groups."""
    steps = _kept_steps(state, numbers)
    return tuple(key for step in steps for key in (step_key(step.cut.step), *map(group_key, step.cut.groups)))


def step_members(state: StateView[StateValue], numbers: Iterable[int]) -> Iterator[Trajectory]:
    """The rollouts of those steps that are kept."""
    group_ids = (group_id for step in _kept_steps(state, numbers) for group_id in step.cut.groups)
    groups = filter(None, (find_group(state, group_id) for group_id in group_ids))
    return (member for group in groups for member in group.members)


def _kept_steps(state: StateView[StateValue], numbers: Iterable[int]) -> Iterator[CutStep]:
    return filter(None, (find_step(state, number) for number in numbers))


def slim(trajectory: Trajectory, *, outputs: bool = False) -> Trajectory:
    """Only what a step needs: ids, masks, log-probs, versions, turns and rewards; of texts at most the output."""
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
    cleared: dict[str, Any] = {"prompt_messages": None, "response_messages": None, "tools": None, "metadata": kept}
    return trace.model_copy(update=cleared)


def _decode_progress(payload: bytes) -> RunProgress:
    progress: RunProgress = decode(RunProgress, payload)
    return progress


def _decode_step(payload: bytes) -> CutStep:
    step: CutStep = decode(CutStep, payload)
    return step


def _decode_marker(payload: bytes) -> ClosedGroupMarker:
    marker: ClosedGroupMarker = decode(ClosedGroupMarker, payload)
    return marker
