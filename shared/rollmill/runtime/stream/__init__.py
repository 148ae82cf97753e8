"""The one stage engine: tasks, transactions, state with changelog, dead letters, drain.

In: the records of a task's input partitions. Out: what the stage emits. State: folded deltas in memory and in a
compacted changelog. On a crash: the next owner of the task fences the old one, restores the state from the
changelog and goes on at the position that the last committed transaction wrote there.
"""

from rollmill.runtime.stream.processor import (
    NOTHING,
    InputRecord,
    OutputRecord,
    Outputs,
    Processor,
    StateUpdate,
    StateView,
    TaskContext,
    TaskLocal,
)

__all__ = [
    "NOTHING",
    "InputRecord",
    "OutputRecord",
    "Outputs",
    "Processor",
    "StateUpdate",
    "StateView",
    "TaskContext",
    "TaskLocal",
]
