"""The content of the log and of the trainer's journal at the end, as the oracle takes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orjson

from chaos.stack import Stack
from chaos.trainer import HANDED_OVER, JOURNAL
from rollmill.codec import decode
from rollmill.errors import PoisonRecordError
from rollmill.models import CompletionRecord, TokenDisposition
from rollmill.ops.dlq import read_letters
from rollmill.runtime.kafka.log_reader import Log
from rollmill.topics import BUILT, COMPLETIONS, OUTCOMES

EXACTLY_ONCE = ("builder", "reward-merger", "batcher")
"""Stages on the engine. A trainer that restarts from a checkpoint reports again, and the ledger allows for that."""


@dataclass(frozen=True)
class CapturedCall:
    """One completion in the log."""

    session_id: str
    completion_id: str
    prompt: list[int]
    reply: list[int]


@dataclass(frozen=True)
class TrainedTrace:
    """One trace in the trainer's journal."""

    session_id: str
    units: tuple[tuple[str, int, int, int], ...]
    """Completion id, choice, start, stop."""
    ids: list[int]
    mask: list[int]
    log_probs: list[float]
    reward: float

    @classmethod
    def read(cls, line: dict[str, Any]) -> TrainedTrace:
        return cls(**{**line, "units": tuple(map(tuple, line["units"]))})


@dataclass
class Observations:
    captured: dict[str, CapturedCall] = field(default_factory=dict)
    """By completion id; repeats of one are one."""
    outcomes: dict[str, TokenDisposition] = field(default_factory=dict)
    """By outcome id; repeats of one are one."""
    repeated: list[TokenDisposition] = field(default_factory=list)
    """Reported twice by one stage: its transactions make that impossible."""
    built: Counter[str] = field(default_factory=Counter)
    """Trajectories by session."""
    trained: list[TrainedTrace] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Of the journal, in its order."""
    digests: dict[str, set[str]] = field(default_factory=dict)
    """By batch id: of every version that was handed over as this batch."""
    dead_letters: Counter[str] = field(default_factory=Counter)
    """By reason."""


async def collect(stack: Stack) -> Observations:
    observations = Observations()
    async with Log.open(stack.settings) as log:
        async for record in log.read(COMPLETIONS):
            _add_completion(observations, record)
        async for record in log.read(OUTCOMES):
            _add_outcome(observations, record)
        async for record in log.read(BUILT):
            observations.built[(record.key or b"").decode()] += 1
    letters = await read_letters(stack.settings)
    observations.dead_letters.update(letter.info.reason for letter in letters.values())
    _read_journal(stack, observations)
    return observations


def _add_outcome(observations: Observations, record: Any) -> None:
    outcome: TokenDisposition = decode(TokenDisposition, record.value, tuple(record.headers))
    if outcome.outcome_id in observations.outcomes and outcome.stage in EXACTLY_ONCE:
        observations.repeated.append(outcome)
    observations.outcomes[outcome.outcome_id] = outcome


def _add_completion(observations: Observations, record: Any) -> None:
    try:
        event = decode(COMPLETIONS.model, record.value, tuple(record.headers))
    except PoisonRecordError:
        return  # it is among the dead letters
    if not isinstance(event, CompletionRecord):
        return
    for choice in event.choices:
        ids = [] if choice.token_ids is None else list(map(int, choice.token_ids))
        prompt = [] if event.prompt_ids is None else list(map(int, event.prompt_ids))
        observations.captured[event.completion_id] = CapturedCall(event.session_id, event.completion_id, prompt, ids)


def _read_journal(stack: Stack, observations: Observations) -> None:
    directory = stack.trainer_directory
    for line in (directory / JOURNAL).read_bytes().splitlines():
        step = orjson.loads(line)
        observations.steps.append(step["step"])
        observations.trained += map(TrainedTrace.read, step["traces"])
    for line in (directory / HANDED_OVER).read_bytes().splitlines():
        handed_over = orjson.loads(line)
        if "batch_id" in handed_over:
            observations.digests.setdefault(handed_over["batch_id"], set()).add(handed_over["digest"])
