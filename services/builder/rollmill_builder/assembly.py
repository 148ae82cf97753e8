"""Branches to traces: the first prompt, then sampled replies (mask 1) and the context between them (mask 0)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.models import Trace, TraceTurn, VersionRun, VersionRuns, append_run, dump_json
from rollmill_builder.branches import Branch
from rollmill_builder.calls import Call
from rollmill_builder.messages import Message
from rollmill_builder.splice import ended_by_token

Ids = npt.NDArray[np.int32]


def trace_of(branch: Branch, branch_of: Mapping[tuple[str, int], str]) -> Trace:
    """The trace of a branch. ``branch_of`` names the branch that holds a (completion id, choice)."""
    between = list(_between(branch))
    turns = _turns(branch, between)
    ids = [part for call, context in zip(branch.calls, between, strict=True) for part in (context, call.reply_ids)]
    count = turns[-1].stop
    mask, logprobs = _trained(branch, turns, count)
    return Trace(
        prompt_ids=branch.first.prompt_ids,
        response_ids=np.concatenate(ids),
        loss_mask=mask,
        response_logprobs=logprobs if mask.any() else None,
        versions=_versions(branch, between),
        turns=turns,
        prompt_messages=None if branch.first.messages is None else dump_json(branch.first.messages),
        response_messages=_response_messages(branch),
        tools=branch.first.tools,
        finish_reason=branch.calls[-1].choice.finish_reason,
        metadata=_metadata(branch, branch_of),
    )


def _between(branch: Branch) -> Iterator[Ids]:
    """The context in front of each reply: nothing for the first, whose prompt is the trace's."""
    yield np.zeros(0, dtype=np.int32)
    for call, splice in zip(branch.calls[1:], branch.splices, strict=True):
        yield call.prompt_ids[splice.resume :]


def _turns(branch: Branch, between: list[Ids]) -> tuple[TraceTurn, ...]:
    turns, position = [], 0
    drifts = [*(splice.drift for splice in branch.splices), 0]
    for call, context, drift in zip(branch.calls, between, drifts, strict=True):
        start = position + len(context)
        position = start + len(call.reply_ids)
        turns.append(_turn(call, start, position, drift))
    return tuple(turns)


def _turn(call: Call, start: int, stop: int, drift: int) -> TraceTurn:
    return TraceTurn(
        completion_id=call.record.completion_id,
        choice=call.choice.index,
        start=start,
        stop=stop,
        finish_reason=call.choice.finish_reason,
        trained=call.untrained is None,
        reason=call.untrained,
        context_exact=drift == 0,
        temperature=call.record.sampling.temperature,
    )


def _trained(
    branch: Branch, turns: tuple[TraceTurn, ...], count: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    mask, logprobs = np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.float32)
    for call, turn in zip(branch.calls, turns, strict=True):
        if turn.trained and call.choice.logprobs is not None:
            mask[turn.start : turn.stop] = 1
            logprobs[turn.start : turn.stop] = call.choice.logprobs
    return mask, logprobs


def _versions(branch: Branch, between: list[Ids]) -> VersionRuns:
    runs: list[VersionRun] = []
    for call, context in zip(branch.calls, between, strict=True):
        append_run(runs, None, len(context))
        for version, length in call.versions:
            append_run(runs, version if call.untrained is None else None, length)
    return tuple(runs)


def _response_messages(branch: Branch) -> bytes | None:
    """Replies, and the messages that came between them; None where a call's messages are unknown."""
    messages: list[Message] = []
    for before, call in pairwise((None, *branch.calls)):
        if call is None or call.messages is None or call.message is None:
            return None
        if before is not None and before.messages is not None:
            messages += call.messages[len(before.messages) + 1 :]
        messages.append(call.message)
    return dump_json(messages)


def _metadata(branch: Branch, branch_of: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    parent, broken = branch.link.parent, branch.link.broken
    found: dict[str, Any] = {
        "branch": branch.name,
        "parent": parent and parent.record.completion_id,
        "parent_choice": parent and parent.choice.index,
        "parent_branch": parent and branch_of.get(parent.name),
        "break_reason": branch.break_reason,
        "break_at": broken and broken.at,
        "drift": sum(splice.drift > 0 for splice in branch.splices),
        "policy": branch.first.record.policy.name,
    }
    flags = {"fingerprint": branch.first.record.fingerprint, "duplicate_end_tokens": _duplicate_ends(branch)}
    return found | {name: value for name, value in flags.items() if value}


def _duplicate_ends(branch: Branch) -> int:
    """How often the template wrote an end-of-turn token after one that was sampled."""
    joins = zip(branch.calls, branch.calls[1:], branch.splices, strict=False)
    return sum(_is_doubled(before, call.prompt_ids[splice.resume :]) for before, call, splice in joins)


def _is_doubled(before: Call, context: Ids) -> bool:
    return ended_by_token(before) and len(context) > 0 and int(context[0]) == int(before.reply_ids[-1])
