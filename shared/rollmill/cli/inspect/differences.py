"""Where a prompt differs from the earlier call with the longest common prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollmill.models import CompletionRecord, Trace

SHOWN = 12
"""Tokens shown of either side."""

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Difference:
    """The prompt and ``call`` have ``same`` leading tokens in common."""

    call: str
    choice: int
    same: int
    before: tuple[int, ...]
    """The call's next tokens: of the rest of its prompt and its reply, the first ones."""
    after: tuple[int, ...]
    """The prompt's next tokens."""
    in_reply: bool
    """Whether they differ within the call's reply, and not already within its prompt."""


def nearest(trace: Trace, calls: Sequence[CompletionRecord]) -> Difference | None:
    """The difference to the call that shares most leading tokens; the earliest of equals; None without any."""
    own = trace.turns[0].completion_id if trace.turns else ""
    found = [_difference(*other, trace.prompt_ids) for other in _others(own, calls)]
    best = max(found, key=lambda item: item.same, default=None)
    return best if best is not None and best.same else None


def _others(own: str, calls: Sequence[CompletionRecord]) -> Iterator[tuple[str, int, Ids, Ids]]:
    """Call, choice, prompt ids, reply ids."""
    for call in sorted(calls, key=lambda item: (item.started_at, item.completion_id)):
        if call.completion_id == own:
            return
        if call.prompt_ids is not None:
            for choice in call.choices:
                if choice.token_ids is not None:
                    yield call.completion_id, choice.index, call.prompt_ids, choice.token_ids


def _difference(call: str, choice: int, prompt: Ids, reply: Ids, ours: Ids) -> Difference:
    whole = np.concatenate((prompt, reply))
    same = _common(whole, ours)
    return Difference(call, choice, same, _head(whole, same), _head(ours, same), in_reply=same >= len(prompt))


def _head(ids: Ids, start: int) -> tuple[int, ...]:
    return tuple(ids[start : start + SHOWN].tolist())


def _common(left: Ids, right: Ids) -> int:
    count = min(len(left), len(right))
    differing = np.flatnonzero(left[:count] != right[:count])
    return int(differing[0]) if len(differing) else count
