"""Generation prompts that end with more than history keeps: an empty thinking block, or an opened one."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollmill.models import CompletionRecord, Trajectory
from rollmill.testing.samples.sessions import Message, assistant, choice, completion, session_of, user
from rollmill_builder.merging.prefix_merging import PrefixMergingBuilder
from rollmill_builder.sessions.outputs import close_counts

ASK = [user("?")]
BASE = [900, 903, 31, 901, 902, 900, 904, 902]
EMPTY = [910, 905, 911, 905]
"""What the template ends a generation prompt with when thinking is switched off."""
NEXT = [902, 900, 903, 32, 901, 902, 900, 904, 902]


def built(*records: CompletionRecord, **config: Any) -> Trajectory:
    return PrefixMergingBuilder(**config).build(session_of(*records))


def scaffolded(**more: Any) -> list[CompletionRecord]:
    """Three turns; each prompt ends with the scaffold, and no later one holds it."""
    replies = [[21, 22, 901], [23, 901], [24, 901]]
    records, history, messages = [], BASE, ASK
    for turn, reply in enumerate(replies):
        message = assistant(f"reply {turn}")
        records.append(
            completion(
                f"c{turn}", [*history, *EMPTY], choice(reply, message=message), at=1.0 + turn, messages=messages, **more
            )
        )
        history, messages = [*history, *reply, *NEXT], [*messages, message, user("and?")]
    return records


def test_a_scaffold_that_history_lacks_is_a_break_with_its_name() -> None:
    trajectory = built(*scaffolded())
    assert [trace.metadata["break_reason"] for trace in trajectory.traces] == [None, *["scaffold_removed"] * 2]
    assert [trace.metadata["break_at"] for trace in trajectory.traces] == [None, len(BASE), len(BASE) + 3 + len(NEXT)]
    assert [trace.metadata.get("break_from") for trace in trajectory.traces] == [None, "c0", "c1"]
    assert trajectory.trained_tokens == 7
    assert close_counts(trajectory)["break_scaffold_removed"] == 2


def test_the_order_of_arrival_does_not_matter() -> None:
    assert built(*reversed(scaffolded())) == built(*scaffolded())


def test_merging_across_scaffolds_is_a_choice_that_shows() -> None:
    (trace,) = built(*scaffolded(), on_scaffold="merge").traces
    assert trace.prompt_ids.tolist() == [*BASE, *EMPTY]
    between = [*NEXT, *EMPTY]
    assert trace.response_ids.tolist() == [21, 22, 901, *between, 23, 901, *between, 24, 901]
    assert np.flatnonzero(trace.loss_mask).tolist() == [0, 1, 2, 16, 17, 31, 32]
    assert trace.metadata["scaffolds"] == 2
    assert trace.metadata["drift"] == 0
    assert [turn.context_exact for turn in trace.turns] == [False, False, True]


def test_an_edited_reply_is_never_merged_across_a_scaffold() -> None:
    records = scaffolded()
    edited = completion("c1", [*BASE, 21, 29, 901, *NEXT, *EMPTY], [23, 901], at=2.0)
    trajectory = built(records[0], edited, on_scaffold="merge")
    assert len(trajectory.traces) == 2


def test_a_thought_that_was_opened_by_the_prompt_and_left_out_of_history_has_its_name() -> None:
    """The generation prompt ends with the opening of a thought; history holds the answer alone."""
    message = assistant("a", reasoning_content="need")
    first = completion("c0", [*BASE, 910, 905], choice([31, 32, 911, 21, 901], message=message), at=1.0, messages=ASK)
    history: list[Message] = [*ASK, message, user("and?")]
    second = completion("c1", [*BASE, 21, 901, *NEXT, 910, 905], [33, 911, 22, 901], at=2.0, messages=history)
    trajectory = built(first, second)
    assert [trace.metadata["break_reason"] for trace in trajectory.traces] == [None, "reasoning_stripped"]
    assert trajectory.traces[1].metadata["break_from"] == "c0"
    assert trajectory.trained_tokens == 9


def test_another_conversation_that_begins_alike_is_none_of_it() -> None:
    other = completion("x", [*BASE[:-1], 77, 21, 22, 901], [5, 901], at=2.0, messages=[user("else")])
    trajectory = built(scaffolded()[0], other)
    assert [trace.metadata["break_reason"] for trace in trajectory.traces] == [None, "compaction"]
