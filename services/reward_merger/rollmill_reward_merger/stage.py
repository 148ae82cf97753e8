"""The reward-merger's stage: joins built trajectories and evaluations, one session at a time."""

from __future__ import annotations

from collections.abc import Mapping

from rollmill.codec import CONTENT_TYPE, MSGPACK, manifest_header
from rollmill.errors import PoisonRecordError
from rollmill.models import Evaluation, Manifest, Trajectory
from rollmill.runtime.stream import InputRecord, OutputRecord, Outputs, Processor, StateUpdate, StateView, TaskContext
from rollmill.runtime.stream.rerouting import rerouted
from rollmill.topics import BUILT, EVALUATIONS, STATE_REWARD_MERGER, TRAJECTORIES, partition_of
from rollmill_reward_merger.merging import is_timer
from rollmill_reward_merger.revisions import revision_inputs, revisions
from rollmill_reward_merger.size_limit import HEADROOM, fit, without_texts
from rollmill_reward_merger.state import (
    CLOSED_SUFFIX,
    EVALUATIONS_SUFFIX,
    Built,
    ClosedMarker,
    StateValue,
    apply_update,
    evaluations_of,
    fingerprint,
    key_of,
    pack_closed,
    pack_evaluation,
    pack_trajectory,
    short_hash,
)
from rollmill_reward_merger.timers import Timer, TimerScheduler, Windows, is_record_of

MAX_EVALUATIONS = 256
"""Of one session: each makes a revision, and every revision carries all before it."""


class RewardMergerStage(Processor[StateValue, TimerScheduler]):
    """``built`` and ``evaluations`` in, revisions of ``trajectories`` out.

    ``partitions`` is the number of the co-partitioned topics: an evaluation on another partition than its session's
    is rerouted (rule M3), a trajectory there is a dead letter. ``largest``: most bytes of a trajectory.
    """

    name = "reward-merger"
    inputs = (BUILT, EVALUATIONS)
    state_topic = STATE_REWARD_MERGER

    def __init__(self, *, partitions: int, windows: Windows, largest: int = TRAJECTORIES.max_bytes) -> None:
        self._partitions, self._largest = partitions, largest
        self._windows = windows

    def task_local(self) -> TimerScheduler:
        return TimerScheduler(self._windows)

    def apply(self, key: str, value: StateValue | None, payload: bytes, _local: TimerScheduler) -> StateValue:
        return apply_update(key, value, payload)

    def process(self, state: StateView[StateValue], record: InputRecord, _local: TimerScheduler) -> Outputs:
        """Raises PoisonRecordError for what cannot be read, contradicts an earlier record, or comes too late."""
        value = record.read()
        if isinstance(value, Trajectory):
            self._refuse_misplaced(value, record)
            return _take_built(state, value, self._largest)
        if not isinstance(value, Evaluation):
            raise TypeError(f"{record.topic.name} holds {type(value).__name__}")
        home = self._home_partition(value)
        if home != record.partition:
            return rerouted(record, value.session_id, home, count="evaluations_sent_on")
        return _take_evaluation(state, value, self._largest)

    def punctuate(self, state: StateView[StateValue], context: TaskContext, local: TimerScheduler) -> Outputs:
        due = local.due_records(state, context.now)
        records = tuple(OutputRecord(EVALUATIONS, each.session_id, each, partition=context.partition) for each in due)
        return Outputs(records=records, counts={"timers_asked": len(records)} if records else {})

    def gauges(self, state: StateView[StateValue], _local: TimerScheduler) -> Mapping[str, float]:
        return {"trajectories_held": sum(isinstance(value, Built) for _, value in state.items())}

    def _home_partition(self, value: Trajectory | Evaluation) -> int:
        return partition_of(value.session_id.encode(), self._partitions)

    def _refuse_misplaced(self, trajectory: Trajectory, record: InputRecord) -> None:
        home = self._home_partition(trajectory)
        if home != record.partition:
            raise PoisonRecordError(
                "wrong_partition",
                f"session {trajectory.session_id} belongs to partition {home} of {self._partitions}, not "
                f"{record.partition}: produce with the session id as key and the murmur2 partitioner",
            )


def _take_built(state: StateView[StateValue], trajectory: Trajectory, largest: int) -> Outputs:
    key, payload = key_of(trajectory), pack_trajectory(trajectory)
    digest = short_hash(payload)
    earlier = state.get(key) or state.get(key + CLOSED_SUFFIX)
    if isinstance(earlier, (Built, ClosedMarker)):
        return _duplicate_built(trajectory, same=earlier.digest == digest)
    _refuse_too_large(trajectory, len(payload), largest - HEADROOM)
    evaluations = evaluations_of(state, key)
    records, counts = _revision_records(trajectory, evaluations, largest, after=0)
    closing = _closing(evaluations)
    if closing is not None:
        return _close(key, digest, evaluations, closing, records, counts)
    # With a revision in the same transaction the units are pending downstream, although a copy stays for revisions.
    kept = StateUpdate(key, payload, replaces=True, manifest=None if records else trajectory.manifest)
    return Outputs(records=records, updates=(kept,), counts=counts)


def _duplicate_built(trajectory: Trajectory, *, same: bool) -> Outputs:
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


def _take_evaluation(state: StateView[StateValue], evaluation: Evaluation, largest: int) -> Outputs:
    key = key_of(evaluation)
    marker = state.get(key + CLOSED_SUFFIX)
    if isinstance(marker, ClosedMarker):
        return _after_closing(key, marker, evaluation)
    earlier = evaluations_of(state, key)
    same_id = next((each for each in earlier if each.evaluation_id == evaluation.evaluation_id), None)
    if same_id is not None:
        return _duplicate(evaluation, same=fingerprint(same_id) == fingerprint(evaluation))
    if _closing(earlier) is not None:
        return _late(evaluation)
    _refuse_too_many(earlier, evaluation)
    built = state.get(key)
    if is_record_of(Timer.EXPIRED, evaluation):
        return _expire_orphans(key, earlier, built)
    if isinstance(built, Built):
        return _merged(key, built, earlier, evaluation, largest)
    return Outputs(updates=(_evaluation_update(key, evaluation),), counts={"evaluations_waiting": 1})


def _refuse_too_many(earlier: tuple[Evaluation, ...], evaluation: Evaluation) -> None:
    if len(earlier) >= MAX_EVALUATIONS and not is_timer(evaluation):
        raise PoisonRecordError(
            "too_many_evaluations", f"session {evaluation.session_id} has {len(earlier)} evaluations already"
        )


def _merged(key: str, built: Built, earlier: tuple[Evaluation, ...], evaluation: Evaluation, largest: int) -> Outputs:
    """The revisions that ``evaluation`` makes, or the end of revisions."""
    after = len(revision_inputs(built.trajectory.spec, earlier))
    records, counts = _revision_records(built.trajectory, (*earlier, evaluation), largest, after=after)
    if is_record_of(Timer.REVISIONS_CLOSED, evaluation):
        return _close(key, built.digest, earlier, evaluation, records, counts)
    if is_timer(evaluation) and not records:
        return Outputs(counts={"timers_ignored": 1})
    update = _evaluation_update(key, evaluation, sent=bool(records))
    return Outputs(records=records, updates=(update,), counts=counts)


def _evaluation_update(key: str, evaluation: Evaluation, *, sent: bool = False) -> StateUpdate:
    """``sent``: the trajectory is sent in the same transaction; a manifest without units tells the ledger so."""
    empty = Manifest(session_id=evaluation.session_id, attempt=evaluation.attempt) if sent else None
    return StateUpdate(key + EVALUATIONS_SUFFIX, pack_evaluation(evaluation), manifest=empty)


def _revision_records(
    trajectory: Trajectory, evaluations: tuple[Evaluation, ...], largest: int, *, after: int
) -> tuple[tuple[OutputRecord, ...], Mapping[str, float]]:
    """The revisions from number ``after`` on, and what they count."""
    merged = revisions(trajectory, evaluations, after=after)
    graded = sum(each.graded for each in merged)
    counts: dict[str, float] = {"trajectories": len(merged), "graded": graded, "ungraded": len(merged) - graded}
    rewards = [each.outcome_reward for each in merged if each.outcome_reward is not None]
    counts["reward_positive"] = sum(reward for reward in rewards if reward > 0)
    counts["reward_negative"] = -sum(reward for reward in rewards if reward < 0)
    records = tuple(_revision_record(each, largest) for each in merged)
    return records, {name: amount for name, amount in counts.items() if amount}


def _revision_record(trajectory: Trajectory, largest: int) -> OutputRecord:
    """Encoded here, because its size decides what has to be left out; the units are in a header (rule L2)."""
    headers = (manifest_header(trajectory.manifest), (CONTENT_TYPE, MSGPACK.encode()))
    return OutputRecord(TRAJECTORIES, trajectory.session_id, fit(trajectory, largest), headers)


def _closing(evaluations: tuple[Evaluation, ...]) -> Evaluation | None:
    """The record that closed the revisions; it can be read before the trajectory."""
    return next((each for each in evaluations if is_record_of(Timer.REVISIONS_CLOSED, each)), None)


def _close(
    key: str,
    digest: bytes,
    evaluations: tuple[Evaluation, ...],
    closing: Evaluation,
    records: tuple[OutputRecord, ...],
    counts: Mapping[str, float],
) -> Outputs:
    known = tuple(fingerprint(each) for each in evaluations if not is_timer(each))
    marker = StateUpdate(key + CLOSED_SUFFIX, pack_closed(ClosedMarker(closing.at, digest, known)), replaces=True)
    deletes = (key, key + EVALUATIONS_SUFFIX)
    return Outputs(records=records, updates=(marker,), deletes=deletes, counts={**counts, "revisions_closed": 1})


def _after_closing(key: str, marker: ClosedMarker, evaluation: Evaluation) -> Outputs:
    if is_record_of(Timer.EXPIRED, evaluation):
        return Outputs(deletes=(key + CLOSED_SUFFIX,), counts={"markers_forgotten": 1})
    same = marker.matches(evaluation)
    return _late(evaluation) if same is None else _duplicate(evaluation, same=same)


def _late(evaluation: Evaluation) -> Outputs:
    """A timer's record after the closing is ignored; any other evaluation is too late."""
    if is_timer(evaluation):
        return Outputs(counts={"timers_ignored": 1})
    raise PoisonRecordError(
        "late_evaluation",
        f"evaluation {evaluation.evaluation_id} by {evaluation.evaluator} came after the revisions of session "
        f"{evaluation.session_id}:{evaluation.attempt} were closed",
    )


def _duplicate(evaluation: Evaluation, *, same: bool) -> Outputs:
    if same or is_timer(evaluation):
        return Outputs(counts={"duplicates": 1})
    if evaluation.repeatable:
        return Outputs(counts={"repeats_with_another_result": 1})
    raise PoisonRecordError(
        "conflict",
        f"evaluation {evaluation.evaluation_id} of session {evaluation.session_id} came before, with other content: "
        "a revised reward needs an id of its own, with `supersedes`",
    )


def _expire_orphans(key: str, evaluations: tuple[Evaluation, ...], built: StateValue | None) -> Outputs:
    if built is not None or not evaluations:
        return Outputs(counts={"timers_ignored": 1})
    return Outputs(deletes=(key + EVALUATIONS_SUFFIX,), counts={"evaluations_orphaned": len(evaluations)})
