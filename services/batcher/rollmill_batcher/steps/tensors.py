"""Packed micro-batches as safetensors, in the minimal types of `rollmill.models.TENSORS` (rule B4).

No Python loop runs over tokens: arrays are joined, and only runs (of versions, of turns) are iterated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from rollmill.models import EXTRA, EXTRA_SPANS, BatchHeader, Trace, dump_json
from rollmill.models.extras import Form, form_of

HEADER = "header"
FILLER_TOKENS = 8
"""Longest filler: enough for a forward pass, next to nothing in time."""

Array = npt.NDArray[np.generic]
Tensors = dict[str, Array]
NO_FORMS: Mapping[str, Form] = MappingProxyType({})


@dataclass(frozen=True)
class PackedTrace:
    """A trace as it goes into a micro-batch, with what its step computed for it. ``row``: in the header's table."""

    trace: Trace
    row: int
    advantage: float
    weight: float
    group: int = -1
    session: int = -1
    later_reward: float = 0.0
    """Reward that the rollout gets after the trace."""


def pack_tensors(packed: Sequence[PackedTrace], forms: Mapping[str, Form] = NO_FORMS) -> Tensors:
    """Tensors of one micro-batch: [T] over all tokens, trace after trace, or [N] over traces.

    ``forms``: the extras of the step; an extra of another form is left out.
    """
    traces = [each.trace for each in packed]
    lengths = [len(trace.prompt_ids) + len(trace.response_ids) for trace in traces]
    tensors: Tensors = {
        "input_ids": np.concatenate([part for t in traces for part in (t.prompt_ids, t.response_ids)]),
        "loss_mask": _over_tokens(traces, np.uint8, lambda trace: trace.loss_mask),
        "behavior_log_probs": _over_tokens(traces, np.float32, _log_probs),
        "versions": np.array([run for trace in traces for run in _version_runs(trace)], dtype=np.int32),
        "turn_ids": np.array([run for trace in traces for run in _turn_runs(trace)], dtype=np.int32),
        "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32),
        "prompt_lengths": np.array([len(trace.prompt_ids) for trace in traces], dtype=np.int32),
        "trace_index": np.array([each.row for each in packed], dtype=np.int32),
        "group_index": np.array([each.group for each in packed], dtype=np.int32),
        "session_index": np.array([each.session for each in packed], dtype=np.int32),
        "advantages": np.array([each.advantage for each in packed], dtype=np.float32),
        "rewards": np.array([trace.reward or 0.0 for trace in traces], dtype=np.float32),
        "later_rewards": np.array([each.later_reward for each in packed], dtype=np.float32),
        "loss_weights": np.array([each.weight for each in packed], dtype=np.float32),
        "temperatures": np.array([each for trace in traces for each in _temperatures(trace)], dtype=np.float32),
    }
    if any(trace.token_rewards is not None for trace in traces):
        tensors["token_rewards"] = _over_tokens(traces, np.float32, _token_rewards)
    for name, form in forms.items():
        tensors |= _extra(name, form, traces)
    return tensors


def filler(trace: Trace) -> PackedTrace:
    """The first tokens of ``trace`` with nothing to train in them: row -1, weight and advantage 0."""
    ids = np.concatenate([trace.prompt_ids, trace.response_ids])[:FILLER_TOKENS]
    idle = Trace(
        prompt_ids=ids,
        response_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.uint8),
    )
    return PackedTrace(idle, row=-1, advantage=0.0, weight=0.0)


def encode_batch(header: BatchHeader, tensors: Mapping[str, Array]) -> bytes:
    """The record: safetensors with the header as JSON in its metadata. Equal content gives equal bytes."""
    text = dump_json(header.model_dump(mode="json")).decode()
    return save({name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}, metadata={HEADER: text})


def _over_tokens(
    traces: Sequence[Trace], dtype: type[np.generic], of_response: Callable[[Trace], Array]
) -> npt.NDArray[np.generic]:
    """Values of the responses, zeros at the prompts."""
    parts: list[Array] = []
    for trace in traces:
        parts += [np.zeros(len(trace.prompt_ids), dtype), of_response(trace)]
    return np.concatenate(parts).astype(dtype, copy=False)


def _log_probs(trace: Trace) -> Array:
    if trace.response_logprobs is None:
        return np.zeros(len(trace.response_ids), np.float32)
    return np.where(trace.loss_mask, trace.response_logprobs, np.float32(0.0))


def _token_rewards(trace: Trace) -> Array:
    return np.zeros(len(trace.response_ids), np.float32) if trace.token_rewards is None else trace.token_rewards


def _extra(name: str, form: Form, traces: Sequence[Trace]) -> Tensors:
    """Rows of the traces that have the extra, and the (first token, length) that they belong to."""
    dtype, shape = form
    rows: list[Array] = [np.zeros((0, *shape), dtype)]
    spans: list[tuple[int, int]] = []
    position = 0
    for trace in traces:
        values, first = trace.extras.get(name), position + len(trace.prompt_ids)
        if values is not None and form_of(values) == form:
            rows.append(values)
            spans.append((first, len(values)))
        position = first + len(trace.response_ids)
    return {EXTRA + name: np.concatenate(rows), EXTRA_SPANS + name: np.array(spans, np.int32).reshape(-1, 2)}


def extra_forms(traces: Sequence[Trace]) -> dict[str, Form]:
    """By name, the form that most of the traces have, so that it is the same on every rank."""
    found: dict[str, Counter[Form]] = {}
    for trace in traces:
        for name, values in trace.extras.items():
            found.setdefault(name, Counter())[form_of(values)] += 1
    return {name: min(counts, key=lambda form: (-counts[form], form)) for name, counts in sorted(found.items())}


def _version_runs(trace: Trace) -> list[tuple[int, int, int]]:
    """(epoch, version, length) over prompt and response; context is (-1, -1)."""
    runs = [(-1, -1, len(trace.prompt_ids))]
    runs += [(*(version or (-1, -1)), length) for version, length in trace.versions]
    if not trace.versions:
        runs.append((-1, -1, len(trace.response_ids)))
    return [run for run in runs if run[2]]


def _turn_runs(trace: Trace) -> list[tuple[int, int]]:
    """(turn, length) over prompt and response; tokens that no turn sampled are turn -1."""
    runs: list[tuple[int, int]] = []
    position = -len(trace.prompt_ids)
    for number, turn in enumerate(trace.turns):
        runs += [(-1, turn.start - position), (number, turn.stop - turn.start)]
        position = turn.stop
    runs.append((-1, len(trace.response_ids) - position))
    return [run for run in runs if run[1]]


def _temperatures(trace: Trace) -> list[float]:
    """Of each of `_turn_runs`: the turn's own; where it has none, that of the first trained turn that has one.

    0.0 where no turn has one.
    """
    own = [turn.temperature for turn in trace.turns]
    trained = (turn.temperature for turn in trace.turns if turn.trained and turn.temperature is not None)
    other = next(trained, 0.0)
    known = [other if temperature is None else temperature for temperature in own]
    return [other if turn < 0 else known[turn] for turn, _ in _turn_runs(trace)]
