"""The builder that the field runs today, written from its published description: lists of ints, compared in full.

Each record becomes a trace of its own first, a validated model of lists. Traces are grouped by comparing each prompt
with the last prompt of every chain, and each group is merged by comparing the prompts once more. Nothing here is slower
than the description requires: records are read once, lists are compared by slices, and no text is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import BaseModel, field_validator

from rollmill.models import CompletionRecord


class ListTrace(BaseModel):
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    response_logprobs: list[float]
    finish_reason: str | None = None

    @field_validator("loss_mask")
    @classmethod
    def _is_binary(cls, mask: list[int]) -> list[int]:
        if not set(mask) <= {0, 1}:
            raise ValueError("a mask holds 0 and 1")
        return mask


@dataclass
class ListCall:
    """A record as decoded JSON gives it."""

    started_at: float
    completion_id: str
    prompt: list[int]
    reply: list[int]
    logprobs: list[float]
    finish_reason: str | None = "stop"


def as_lists(records: Sequence[CompletionRecord]) -> list[ListCall]:
    return [_as_lists(record) for record in records]


def _as_lists(record: CompletionRecord) -> ListCall:
    (choice,) = record.choices
    arrays = (record.prompt_ids, choice.token_ids, choice.logprobs)
    prompt, reply, logprobs = (array.tolist() for array in arrays if array is not None)
    return ListCall(record.started_at, record.completion_id, prompt, reply, logprobs, choice.finish_reason)


def build(calls: Sequence[ListCall]) -> list[ListTrace]:
    """Records to traces, traces to chains, chains to traces."""
    ordered = sorted(calls, key=lambda call: (call.started_at, call.completion_id))
    return merge([_trace(call) for call in ordered])


def _trace(call: ListCall) -> ListTrace:
    return ListTrace(
        prompt_ids=call.prompt,
        response_ids=[int(token) for token in call.reply],
        loss_mask=[1] * len(call.reply),
        response_logprobs=call.logprobs,
        finish_reason=call.finish_reason,
    )


def merge(traces: Sequence[ListTrace]) -> list[ListTrace]:
    return [_merged(chain) for chain in _grouped(traces)]


def _grouped(traces: Sequence[ListTrace]) -> list[list[ListTrace]]:
    """Each trace joins the chain with the longest last prompt that its own begins with."""
    chains: list[list[ListTrace]] = []
    for trace in traces:
        best: list[ListTrace] | None = None
        for chain in chains:
            tip = chain[-1].prompt_ids
            longer = best is None or len(tip) > len(best[-1].prompt_ids)
            if longer and tip and trace.prompt_ids[: len(tip)] == tip:
                best = chain
        if best is None:
            chains.append([trace])
        else:
            best.append(trace)
    return chains


def _merged(chain: Sequence[ListTrace]) -> ListTrace:
    first = chain[0]
    end = _end_of_turn(chain)
    response, mask, logprobs = [*first.response_ids], [*first.loss_mask], [*first.response_logprobs]
    for before, trace in pairwise(chain):
        if trace.prompt_ids[: len(before.prompt_ids)] != before.prompt_ids:
            break
        tail = trace.prompt_ids[len(before.prompt_ids) :]
        if end is None or end not in tail:
            break
        at = tail.index(end)
        between = tail[at + 1 :] if before.response_ids[-1:] == [end] else tail[at:]
        response += between + trace.response_ids
        mask += [0] * len(between) + trace.loss_mask
        logprobs += [0.0] * len(between) + trace.response_logprobs
    return ListTrace(prompt_ids=first.prompt_ids, response_ids=response, loss_mask=mask, response_logprobs=logprobs)


def _end_of_turn(chain: Sequence[ListTrace]) -> int | None:
    ended = (trace for trace in chain if trace.finish_reason in ("stop", "tool_calls") and trace.response_ids)
    return next((trace.response_ids[-1] for trace in ended), None)
