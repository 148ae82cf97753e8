"""The demo's check of itself: what was trained, compared with what the agents recorded. Pure.

A rising reward proves little: with the tool's tokens trained, ids replaced or groups scrambled it still rises.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isclose

from relay.agents import Transcript
from relay.task import group_id
from relay.transcripts import AgentsRecord, expected_trace
from rollmill.trainer import PackedArrays, Step

_REWARD_TOLERANCE = 1e-5
_ADVANTAGE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class TrainedTrace:
    """One trace as the trainer saw it; ``mask`` is 1 where a token was trained."""

    session_id: str
    group_id: str
    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    prompt_length: int
    reward: float
    advantages: frozenset[float]
    """Distinct values over the trained tokens."""
    weights: frozenset[float]
    """Distinct loss weights over the trained tokens."""


@dataclass(frozen=True)
class TrainedStep:
    number: int
    denominator: float
    traces: tuple[TrainedTrace, ...]

    @property
    def reward(self) -> float:
        """Mean over the traces."""
        return sum(trace.reward for trace in self.traces) / max(len(self.traces), 1)

    @property
    def tokens(self) -> int:
        return sum(sum(trace.mask) for trace in self.traces)


@dataclass(frozen=True)
class Mismatch:
    """``what`` differs between the training of a step and the agents' record."""

    step: int
    session_id: str
    what: str
    detail: str

    def __str__(self) -> str:
        return f"step {self.step}, session {self.session_id}: {self.what}: {self.detail}"


def trained_step(step: Step) -> TrainedStep:
    """What a step hands to the training loop; traces that were cleared as stale are left out."""
    traces = [trace for packed in step.arrays for trace in _traces(step, packed) if any(trace.mask)]
    return TrainedStep(step.number, step.denominator, tuple(traces))


def _traces(step: Step, packed: PackedArrays) -> Iterator[TrainedTrace]:
    edges = packed.cu_seqlens.tolist()
    for place, row in enumerate(packed.trace_index.tolist()):
        inside = slice(edges[place], edges[place + 1])
        mask = packed.loss_mask[inside]
        yield TrainedTrace(
            session_id=step.header.table[row].session_id,
            group_id=step.header.table[row].group_id,
            token_ids=tuple(packed.input_ids[inside].tolist()),
            mask=tuple(map(int, mask)),
            prompt_length=int(packed.prompt_lengths[place]),
            reward=float(packed.rewards[place]),
            advantages=frozenset(packed.advantages[inside][mask].tolist()),
            weights=frozenset(packed.loss_weight[inside][mask].tolist()),
        )


def mismatches(steps: Iterable[TrainedStep], record: AgentsRecord) -> list[Mismatch]:
    """Everything that differs, one entry for each trace and each thing."""
    found: list[Mismatch] = []
    trained: set[str] = set()
    for step in steps:
        found += _step_mismatches(step)
        for trace in step.traces:
            found += _trace_mismatches(step.number, trace, record, again=trace.session_id in trained)
            trained.add(trace.session_id)
    return found


def _step_mismatches(step: TrainedStep) -> list[Mismatch]:
    if isclose(step.denominator, step.tokens, rel_tol=1e-9):
        return []
    return [Mismatch(step.number, "-", "denominator", f"{step.denominator} for {step.tokens} trained tokens")]


def _trace_mismatches(step: int, trace: TrainedTrace, record: AgentsRecord, *, again: bool) -> list[Mismatch]:
    transcript = record.sessions.get(trace.session_id)
    if transcript is None or not transcript.turns:
        return [Mismatch(step, trace.session_id, "session", "no agent has a record of it")]
    twice = [("twice", "the session was trained before")] if again else []
    differences = [*twice, *_token_differences(trace, transcript), *_learning_differences(trace, transcript, record)]
    return [Mismatch(step, trace.session_id, what, detail) for what, detail in differences]


def _token_differences(trace: TrainedTrace, transcript: Transcript) -> Iterator[tuple[str, str]]:
    wanted = expected_trace(transcript.turns)
    if trace.token_ids != wanted.token_ids:
        yield "ids", f"{trace.token_ids} instead of {wanted.token_ids}"
    if trace.mask != wanted.mask:
        yield "mask", f"{trace.mask} instead of {wanted.mask}"
    if trace.prompt_length != wanted.prompt_length:
        yield "prompt_length", f"{trace.prompt_length} instead of {wanted.prompt_length}"


def _learning_differences(
    trace: TrainedTrace, transcript: Transcript, record: AgentsRecord
) -> Iterator[tuple[str, str]]:
    if trace.group_id != group_id(transcript.group):
        yield "group", f"{trace.group_id} instead of {group_id(transcript.group)}"
    if not isclose(trace.reward, transcript.reward, abs_tol=_REWARD_TOLERANCE):
        yield "reward", f"{trace.reward} instead of {transcript.reward}"
    advantage = record.advantage(transcript)
    if not all(isclose(value, advantage, abs_tol=_ADVANTAGE_TOLERANCE) for value in trace.advantages):
        yield "advantage", f"{sorted(trace.advantages)} instead of {advantage}"
    if trace.weights != {1.0}:
        yield "weight", f"{sorted(trace.weights)} instead of 1.0 for each token"
