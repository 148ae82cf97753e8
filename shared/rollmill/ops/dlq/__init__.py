"""Dead letters for operators: what was set aside and why, driven again, or dropped for good.

In: the topic ``dead-letters``, which is kept for ever. Out: the bytes as received, written to their source topic again,
an outcome ``reopened`` for units that the dead letter had closed, and a decision in the letter's partition, all in one
transaction. State: none; decisions are read from the topic. After a crash a decision is complete or absent.

dead_letter: letters and decisions read from the topic. manager: `DeadLetterManager`, which decides.
"""

from rollmill.ops.dlq.dead_letter import (
    DeadLetter,
    LetterFilter,
    LetterNumber,
    LetterState,
    read_letters,
    read_value,
    select_letters,
)
from rollmill.ops.dlq.manager import DeadLetterManager, open_manager, source_topic

__all__ = [
    "DeadLetter",
    "DeadLetterManager",
    "LetterFilter",
    "LetterNumber",
    "LetterState",
    "open_manager",
    "read_letters",
    "read_value",
    "select_letters",
    "source_topic",
]
