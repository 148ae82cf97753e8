"""A completion that the builder accepts passes through few files: a reader can follow it."""

from __future__ import annotations

from rollmill.codec import encode
from rollmill.models import SessionOpened
from rollmill.runtime.stream.processor import InputRecord
from rollmill.runtime.stream.state import origin_of
from rollmill.strategies import builder_registry
from rollmill.testing.memory_task import MemoryTask
from rollmill.testing.samples.sessions import assistant, completion, user
from rollmill.topics import COMPLETIONS, partition_of
from rollmill_builder.sessions.session_state import OpenSession
from rollmill_builder.stage import BuilderStage, BuilderState
from tests.call_path import recorded_call_path

MOST_FILES = 18
SESSION = "s1"
PARTITIONS = 4


def test_an_accepted_completion_with_a_parent_passes_few_files() -> None:
    """The stage takes the second call of a conversation, and its output is applied to the state."""
    stage = BuilderStage(registry=builder_registry(), partitions=PARTITIONS, late_window=100.0)
    task: MemoryTask[BuilderState] = MemoryTask(stage, partition=partition_of(SESSION.encode(), PARTITIONS))
    question, reply = user("what is 2 + 2?"), assistant("4")
    task.feed(COMPLETIONS, SessionOpened(session_id=SESSION, at=1000.0), key=SESSION)
    task.feed(COMPLETIONS, completion("c1", (1, 2), (5, 9), messages=[question]), key=SESSION)
    second = completion("c2", (1, 2, 5, 9, 3), (6, 9), messages=[question, reply, user("and 3 + 3?")])
    value = encode(second)
    record = InputRecord(COMPLETIONS, task.partition, 2, SESSION.encode(), value)
    with recorded_call_path() as path:
        outputs = stage.process(task.state, record, task.local)
        task.state.stage(outputs, origin_of(0, task.partition, 2))
        task.state.commit()
        task.local.committed(task.state)
    assert outputs.counts["completions"] == 1
    (session,) = [value for _, value in task.state.items() if isinstance(value, OpenSession)]
    assert len(session.calls) == 2
    files = path.files()
    assert "rollmill_builder/storage/trie.py" in files
    assert len(files) <= MOST_FILES, "\n".join([f"{len(files)} files:", *files])
