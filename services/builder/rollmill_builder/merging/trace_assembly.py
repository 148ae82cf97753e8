"""Branches to traces: the first prompt, then sampled replies (mask 1) and the context between them (mask 0)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.models import Trace, VersionRun, VersionRuns, append_run, dump_json
from rollmill_builder.merging.branches import Branch
from rollmill_builder.merging.reply_alignment import ended_by_token
from rollmill_builder.merging.sampled_calls import SampledCall
from rollmill_builder.storage.call_parts import Message

Ids = npt.NDArray[np.int32]
Span = tuple[int, int]


def assemble_trace(branch: Branch, branch_of: Mapping[tuple[str, int], str]) -> Trace:
    """The trace of a branch. ``branch_of`` names the branch that holds a (completion id, choice)."""
    contexts = list(_contexts(branch))
    spans = list(_spans(branch, contexts))
    ids = [part for call, context in zip(branch.calls, contexts, strict=True) for part in (context, call.reply_ids)]
    mask, logprobs = _trained(branch, spans)
    return Trace.model_validate(
        {
            "prompt_ids": branch.first.prompt_ids(branch.dropped_tokens),
            "response_ids": np.concatenate(ids),
            "loss_mask": mask,
            "response_logprobs": logprobs if mask.any() else None,
            "versions": _versions(branch, contexts),
            "turns": _turns(branch, spans),
            "prompt_messages": branch.first.messages_json,
            "response_messages": _response_messages(branch),
            "tools": branch.first.tools,
            "finish_reason": branch.calls[-1].choice.finish_reason,
            "metadata": _metadata(branch, contexts, branch_of),
        }
    )


def _contexts(branch: Branch) -> Iterator[Ids]:
    """The context in front of each reply: nothing for the first, because its prompt is the trace's."""
    yield np.zeros(0, dtype=np.int32)
    for call, alignment in zip(branch.calls[1:], branch.alignments, strict=True):
        yield call.prompt_ids(alignment.resume)


def _spans(branch: Branch, contexts: list[Ids]) -> Iterator[Span]:
    """Start and stop of each reply in the response."""
    position = 0
    for call, context in zip(branch.calls, contexts, strict=True):
        start = position + len(context)
        position = start + len(call.reply_ids)
        yield start, position


def _turns(branch: Branch, spans: list[Span]) -> tuple[dict[str, Any], ...]:
    followed = [*(alignment.exact for alignment in branch.alignments), True]
    turns = zip(branch.calls, spans, followed, strict=True)
    return tuple(_turn(call, span, exact=exact) for call, span, exact in turns)


def _turn(call: SampledCall, span: Span, *, exact: bool) -> dict[str, Any]:
    """A `TraceTurn`, validated with its trace."""
    sampling = call.record.sampling
    return {
        "completion_id": call.record.completion_id,
        "choice": call.choice.index,
        "start": span[0],
        "stop": span[1],
        "finish_reason": call.choice.finish_reason,
        "trained": call.untrained is None,
        "reason": call.untrained,
        "context_exact": exact,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs_mode": sampling.logprobs_mode,
    }


def _trained(branch: Branch, spans: list[Span]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    count = spans[-1][1]
    mask, logprobs = np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.float32)
    for call, (start, stop) in zip(branch.calls, spans, strict=True):
        if call.untrained is None and call.choice.logprobs is not None:
            mask[start:stop] = 1
            logprobs[start:stop] = call.choice.logprobs
    return mask, logprobs


def _versions(branch: Branch, contexts: list[Ids]) -> VersionRuns:
    runs: list[VersionRun] = []
    for call, context in zip(branch.calls, contexts, strict=True):
        append_run(runs, None, len(context))
        for version, length in call.versions:
            append_run(runs, version if call.untrained is None else None, length)
    return tuple(runs)


def _response_messages(branch: Branch) -> bytes | None:
    """The replies and the messages between them, as JSON; None where a call's messages are unknown."""
    messages: list[Message] = []
    for before, call in pairwise((None, *branch.calls)):
        if call is None or call.text is None or call.message is None:
            return None
        if before is not None:
            messages += (call.messages_after(before) or ())[1:]
        messages.append(call.message)
    return dump_json(messages)


def _metadata(branch: Branch, contexts: list[Ids], branch_of: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    link, first = branch.link, branch.first
    parent, mismatch = link.parent, link.mismatch
    found: dict[str, Any] = {
        "branch": branch_of[first.name],
        "parent": parent and parent.record.completion_id,
        "parent_choice": parent and parent.choice.index,
        "parent_branch": parent and branch_of.get(parent.name),
        "break_reason": branch.break_reason,
        "break_at": mismatch and mismatch.at,
        "drift": sum(alignment.drift > 0 for alignment in branch.alignments),
        "policy": first.record.policy.name,
    }
    flags = {
        "began_after": branch.preceding and branch.preceding.record.completion_id,
        "began_after_branch": branch.preceding and branch_of.get(branch.preceding.name),
        "break_from": mismatch and mismatch.call and mismatch.call.record.completion_id,
        "break_tokens": list(branch.break_tokens or ()),
        "scaffolds": sum(alignment.scaffold > 0 for alignment in branch.alignments),
        "fingerprint": first.record.fingerprint,
        "duplicate_end_tokens": _duplicate_ends(branch, contexts),
        "context_dropped": branch.dropped_tokens,
        "over_long": branch.omitted_replies,
    }
    return found | {name: value for name, value in flags.items() if value}


def _duplicate_ends(branch: Branch, contexts: list[Ids]) -> int:
    """How often the template added an end-of-turn token after a sampled one."""
    return sum(_is_doubled(before, context) for before, context in zip(branch.calls, contexts[1:], strict=False))


def _is_doubled(before: SampledCall, context: Ids) -> bool:
    return ended_by_token(before) and len(context) > 0 and int(context[0]) == int(before.reply_ids[-1])
