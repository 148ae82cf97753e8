"""Dead letters for operators: what was set aside and why, driven again, or dropped for good.

In: the topic ``dead-letters``, which is kept for ever. Out: the bytes as received, back in their source topic, with an
outcome ``reopened`` for the units whose account their death had closed, and a decision beside the letter, all in one
transaction. State: none; what was decided is read from the topic. On a crash: all of a decision is there, or nothing.
"""

from rollmill.ops.dlq.dead_letter import DeadLetter, LetterState, Place, Wanted, chosen, read_letters, read_value
from rollmill.ops.dlq.manager import DeadLetterManager, open_manager, source_topic

__all__ = [
    "DeadLetter",
    "DeadLetterManager",
    "LetterState",
    "Place",
    "Wanted",
    "chosen",
    "open_manager",
    "read_letters",
    "read_value",
    "source_topic",
]
