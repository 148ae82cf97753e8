"""The stage engine: tasks, transactions, state with changelog, dead letters, drain.

In: the records of a task's input partitions. Out: the stage's output records. State: values in memory, their updates in
a compacted changelog. On a crash: the next owner of the task fences the old one, restores the state from the
changelog and continues at the position that the last committed transaction wrote there.

`processor` is the contract of a stage. `task` is the loop of one task (`task_identity`: which tasks there are), and
`runner` runs all of a process. `task_consumer` reads input, `batch_processor` turns it into one transaction's batch,
`producer_records` encodes outputs, `dead_letters` sets bad records aside, `rerouting` sends misplaced ones on, `state`
and `changelog` keep and restore the state, `task_metrics` reports. Imports: claim_check, kafka, telemetry, topics,
codec, models, settings, errors.
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
