"""State and changelog: what is restored is what was live, and a rollback is as if nothing had happened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmill.runtime.stream import Outputs, StateUpdate
from rollmill.runtime.stream.state import ChangelogRecord, TaskState, origin_of

Value = tuple[bytes, ...]
KEYS = st.sampled_from(["s1:1", "s1:1/closed", "s2:1", "s2:2"])
PAYLOADS = st.binary(max_size=3)
DELTAS = st.builds(StateUpdate, key=KEYS, payload=PAYLOADS, replaces=st.booleans())
EFFECTS = st.builds(
    Outputs, updates=st.lists(DELTAS, max_size=3).map(tuple), deletes=st.lists(KEYS, max_size=2).map(tuple)
)


def append(_key: str, value: Value | None, payload: bytes) -> Value:
    return (*(value or ()), payload)


class Log:
    """A compacted changelog."""

    def __init__(self) -> None:
        self.live: dict[str, bytes] = {}

    def write(self, records: list[ChangelogRecord]) -> None:
        assert len({record.key for record in records}) == len(records), "one word per key and transaction"
        for record in records:
            if record.payload is None:
                self.live.pop(record.key, None)
            else:
                self.live[record.key] = record.payload


def content(state: TaskState[Value]) -> dict[str, Value]:
    return dict(state.items())


@given(st.lists(st.tuples(EFFECTS, st.booleans()), max_size=20))
def test_restored_equals_live_and_rolled_back_equals_never(steps: list[tuple[Outputs, bool]]) -> None:
    state, log = TaskState(append), Log()
    for offset, (effects, committed) in enumerate(steps):
        before = content(state)
        records = state.stage(effects, origin_of(0, 0, offset))
        if committed:
            log.write(records)
            state.commit()
        else:
            state.rollback()
            assert content(state) == before
    restored = TaskState(append)
    restored.restore(reversed(log.live.items()))
    assert content(restored) == content(state)


@given(st.lists(DELTAS, max_size=10))
def test_an_ended_key_leaves_nothing_in_the_changelog(deltas: list[StateUpdate]) -> None:
    state, log = TaskState(append), Log()
    for offset, delta in enumerate(deltas):
        log.write(state.stage(Outputs(updates=(delta,)), origin_of(1, 3, offset)))
    log.write(state.stage(Outputs(deletes=tuple({delta.key for delta in deltas})), "tick"))
    assert log.live == {}
    assert len(state) == 0
