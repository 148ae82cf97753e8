"""The reward-merger's stage: pure, one session at a time."""

from __future__ import annotations

from collections.abc import Mapping

from rollmill.codec import CONTENT_TYPE, JSON, MSGPACK, header, manifest_header
from rollmill.errors import PoisonRecordError
from rollmill.models import Evaluation, Manifest, Trajectory
from rollmill.runtime.stream import InputRecord, OutputRecord, Outputs, Processor, StateUpdate, StateView, TaskContext
from rollmill.topics import BUILT, EVALUATIONS, STATE_REWARD_MERGER, TRAJECTORIES, partition_of
from rollmill_reward_merger.merging import is_timer
from rollmill_reward_merger.revisions import beginnings, revisions
from rollmill_reward_merger.size_limit import HEADROOM, fit, without_texts
from rollmill_reward_merger.state import (
    CLOSED_OF,
    EVALUATIONS_OF,
    Built,
    ClosedMarker,
    Held,
    fingerprint,
    fold,
    key_of,
    pack_closed,
    pack_evaluation,
    pack_trajectory,
    short_hash,
)
from rollmill_reward_merger.timers import Timer, Watch, Windows, answers_to, is_asked

MAX_EVALUATIONS = 256
"""Of one session: every one makes a revision, and every revision carries all before it."""


class RewardMergerStage(Processor[Held, Watch]):
    """``built`` and ``evaluations`` in, revisions of ``trajectories`` out.

    ``partitions`` is the number of the co-partitioned topics: an evaluation on another partition than its session's
    is sent on (rule M3), a trajectory there is a dead letter. ``largest``: most bytes of a trajectory.
    """

    name = "reward-merger"
    inputs = (BUILT, EVALUATIONS)
    state_topic = STATE_REWARD_MERGER

    def __init__(self, *, partitions: int, windows: Windows, largest: int = TRAJECTORIES.max_bytes) -> None:
        self._partitions, self._largest = partitions, largest
        self._windows = windows

    def task_local(self) -> Watch:
        return Watch(self._windows)

    def apply(self, key: str, value: Held | None, payload: bytes, _local: Watch) -> Held:
        return fold(key, value, payload)

    def process(self, state: StateView[Held], record: InputRecord, _local: Watch) -> Outputs:
        """Raises PoisonRecordError for what cannot be read, contradicts an earlier record, or comes too late."""
        value = record.read()
        if isinstance(value, Trajectory):
            self._refuse_misplaced(value, record)
            return _built(state, value, self._largest)
        if not isinstance(value, Evaluation):
            raise TypeError(f"{record.topic.name} holds {type(value).__name__}")
        home = self._home(value)
        return _sent_on(record, value, home) if home != record.partition else _evaluation(state, value, self._largest)

    def punctuate(self, state: StateView[Held], context: TaskContext, local: Watch) -> Outputs:
        due = local.due(state, context.now)
        emits = tuple(OutputRecord(EVALUATIONS, item.session_id, item, partition=context.partition) for item in due)
        return Outputs(records=emits, counts={"timers_asked": len(emits)} if emits else {})

    def gauges(self, state: StateView[Held], _local: Watch) -> Mapping[str, float]:
        return {"trajectories_held": sum(isinstance(value, Built) for _, value in state.items())}

    def _home(self, value: Trajectory | Evaluation) -> int:
        return partition_of(value.session_id.encode(), self._partitions)

    def _refuse_misplaced(self, trajectory: Trajectory, record: InputRecord) -> None:
        home = self._home(trajectory)
        if home != record.partition:
            raise PoisonRecordError(
                "wrong_partition",
                f"session {trajectory.session_id} belongs to partition {home} of {self._partitions}, not "
                f"{record.partition}: produce with the session id as key and the murmur2 partitioner",
            )


def _built(state: StateView[Held], trajectory: Trajectory, largest: int) -> Outputs:
    key, payload = key_of(trajectory), pack_trajectory(trajectory)
    digest = short_hash(payload)
    earlier = state.get(key) or state.get(key + CLOSED_OF)
    if isinstance(earlier, (Built, ClosedMarker)):
        return _again(trajectory, same=earlier.digest == digest)
    _refuse_too_large(trajectory, len(payload), largest - HEADROOM)
    said = answers_to(state, key)
    emits, counts = _emits(trajectory, said, largest, after=0)
    closing = _closing(said)
    if closing is not None:
        return _close(key, digest, said, closing, emits, counts)
    # What went on in the same transaction is the next stage's to account for, although a copy stays for revisions.
    kept = StateUpdate(key, payload, replaces=True, manifest=None if emits else trajectory.manifest)
    return Outputs(records=emits, updates=(kept,), counts=counts)


def _again(trajectory: Trajectory, *, same: bool) -> Outputs:
    if not same:
        raise PoisonRecordError(
            "conflict",
            f"session {trajectory.session_id}:{trajectory.attempt} was built before, with other content",
            units_held=True,
        )
    return Outputs(counts={"duplicates": 1})


def _refuse_too_large(trajectory: Trajectory, size: int, limit: int) -> None:
    if size > limit and len(pack_trajectory(without_texts(trajectory))) > limit:
        raise PoisonRecordError("too_large", f"{size} bytes leave no room for rewards, at most {limit} do")


def _evaluation(state: StateView[Held], evaluation: Evaluation, largest: int) -> Outputs:
    key = key_of(evaluation)
    marker = state.get(key + CLOSED_OF)
    if isinstance(marker, ClosedMarker):
        return _after_the_end(key, marker, evaluation)
    said = answers_to(state, key)
    earlier = next((item for item in said if item.evaluation_id == evaluation.evaluation_id), None)
    if earlier is not None:
        return _said_again(evaluation, same=fingerprint(earlier) == fingerprint(evaluation))
    if _closing(said) is not None:
        return _late(evaluation)
    _refuse_too_many(said, evaluation)
    built = state.get(key)
    if is_asked(evaluation, Timer.FORGOTTEN):
        return _forget_orphans(key, said, built)
    if isinstance(built, Built):
        return _joined(key, built, said, evaluation, largest)
    return Outputs(updates=(_answer(key, evaluation),), counts={"evaluations_waiting": 1})


def _refuse_too_many(said: tuple[Evaluation, ...], evaluation: Evaluation) -> None:
    if len(said) >= MAX_EVALUATIONS and not is_timer(evaluation):
        raise PoisonRecordError(
            "too_many_evaluations", f"session {evaluation.session_id} has {len(said)} evaluations already"
        )


def _joined(key: str, built: Built, said: tuple[Evaluation, ...], evaluation: Evaluation, largest: int) -> Outputs:
    after = len(beginnings(built.trajectory.spec, said))
    emits, counts = _emits(built.trajectory, (*said, evaluation), largest, after=after)
    if is_asked(evaluation, Timer.REVISIONS_CLOSED):
        return _close(key, built.digest, said, evaluation, emits, counts)
    if is_timer(evaluation) and not emits:
        return Outputs(counts={"timers_ignored": 1})
    return Outputs(records=emits, updates=(_answer(key, evaluation, went_on=bool(emits)),), counts=counts)


def _answer(key: str, evaluation: Evaluation, *, went_on: bool = False) -> StateUpdate:
    """``went_on``: the trajectory is sent with it; a manifest without units says so to the ledger."""
    gone = Manifest(session_id=evaluation.session_id, attempt=evaluation.attempt) if went_on else None
    return StateUpdate(key + EVALUATIONS_OF, pack_evaluation(evaluation), manifest=gone)


def _emits(
    trajectory: Trajectory, said: tuple[Evaluation, ...], largest: int, *, after: int
) -> tuple[tuple[OutputRecord, ...], Mapping[str, float]]:
    merged = revisions(trajectory, said, after=after)
    graded = sum(item.graded for item in merged)
    counts: dict[str, float] = {"trajectories": len(merged), "graded": graded, "ungraded": len(merged) - graded}
    rewards = [item.outcome_reward for item in merged if item.outcome_reward is not None]
    counts["reward_positive"] = sum(reward for reward in rewards if reward > 0)
    counts["reward_negative"] = -sum(reward for reward in rewards if reward < 0)
    return tuple(_emit(item, largest) for item in merged), {name: amount for name, amount in counts.items() if amount}


def _emit(trajectory: Trajectory, largest: int) -> OutputRecord:
    """Encoded here, because the size decides what fits; the units travel in a header (rule L2)."""
    headers = (manifest_header(trajectory.manifest), (CONTENT_TYPE, MSGPACK.encode()))
    return OutputRecord(TRAJECTORIES, trajectory.session_id, fit(trajectory, largest), headers)


def _closing(said: tuple[Evaluation, ...]) -> Evaluation | None:
    """The record that closed the revisions; it can be read before the trajectory."""
    return next((item for item in said if is_asked(item, Timer.REVISIONS_CLOSED)), None)


def _close(
    key: str,
    digest: bytes,
    said: tuple[Evaluation, ...],
    closing: Evaluation,
    emits: tuple[OutputRecord, ...],
    counts: Mapping[str, float],
) -> Outputs:
    known = tuple(fingerprint(item) for item in said if not is_timer(item))
    marker = StateUpdate(key + CLOSED_OF, pack_closed(ClosedMarker(closing.at, digest, known)), replaces=True)
    ends = (key, key + EVALUATIONS_OF)
    return Outputs(records=emits, updates=(marker,), deletes=ends, counts={**counts, "revisions_closed": 1})


def _after_the_end(key: str, marker: ClosedMarker, evaluation: Evaluation) -> Outputs:
    if is_asked(evaluation, Timer.FORGOTTEN):
        return Outputs(deletes=(key + CLOSED_OF,), counts={"markers_forgotten": 1})
    same = marker.recall(evaluation)
    return _late(evaluation) if same is None else _said_again(evaluation, same=same)


def _late(evaluation: Evaluation) -> Outputs:
    """A timer is never late; anything else behind the closing is."""
    if is_timer(evaluation):
        return Outputs(counts={"timers_ignored": 1})
    raise PoisonRecordError(
        "late_evaluation",
        f"evaluation {evaluation.evaluation_id} by {evaluation.evaluator} came after the revisions of session "
        f"{evaluation.session_id}:{evaluation.attempt} were closed",
    )


def _said_again(evaluation: Evaluation, *, same: bool) -> Outputs:
    if same or is_timer(evaluation):
        return Outputs(counts={"duplicates": 1})
    if evaluation.repeatable:
        return Outputs(counts={"repeats_with_another_result": 1})
    raise PoisonRecordError(
        "conflict",
        f"evaluation {evaluation.evaluation_id} of session {evaluation.session_id} came before, with other content: "
        "a revised reward needs an id of its own, with `supersedes`",
    )


def _forget_orphans(key: str, said: tuple[Evaluation, ...], built: Held | None) -> Outputs:
    if built is not None or not said:
        return Outputs(counts={"timers_ignored": 1})
    return Outputs(deletes=(key + EVALUATIONS_OF,), counts={"evaluations_orphaned": len(said)})


def _sent_on(record: InputRecord, evaluation: Evaluation, home: int) -> Outputs:
    """The bytes as received, to the session's partition, in the same transaction (rule M3)."""
    headers = record.headers
    if header(headers, CONTENT_TYPE) is None:
        kind = JSON if (record.value or b"")[:1] == b"{" else MSGPACK
        headers = (*headers, (CONTENT_TYPE, kind.encode()))
    sent = OutputRecord(EVALUATIONS, evaluation.session_id, record.value, headers, partition=home)
    return Outputs(records=(sent,), counts={"evaluations_sent_on": 1})
