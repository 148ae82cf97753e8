"""What the log and the trainer's book say at the end, as the oracle takes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orjson

from chaos.stack import Stack
from chaos.trainer import BOOK, SEEN
from rollmill.codec import decode
from rollmill.errors import PoisonRecordError
from rollmill.models import CompletionRecord, TokenDisposition
from rollmill.ops.dlq import read_letters
from rollmill.ops.ledger.log_reader import Log
from rollmill.topics import BUILT, COMPLETIONS, OUTCOMES

EXACTLY_ONCE = ("builder", "reward-merger", "batcher")
"""Stages on the engine; a trainer that goes back says things again, and the books allow for it."""


@dataclass(frozen=True)
class Captured:
    """One completion of the log."""

    session_id: str
    completion_id: str
    prompt: list[int]
    reply: list[int]


@dataclass(frozen=True)
class Trained:
    """One trace of the trainer's book."""

    session_id: str
    units: tuple[tuple[str, int, int, int], ...]
    """Completion id, choice, start, stop."""
    ids: list[int]
    mask: list[int]
    log_probs: list[float]
    reward: float

    @classmethod
    def read(cls, line: dict[str, Any]) -> Trained:
        return cls(**{**line, "units": tuple(map(tuple, line["units"]))})


@dataclass
class Evidence:
    captured: dict[str, Captured] = field(default_factory=dict)
    """By completion id; repeats of one are one."""
    outcomes: dict[str, TokenDisposition] = field(default_factory=dict)
    """By outcome id; repeats of one are one."""
    repeated: list[TokenDisposition] = field(default_factory=list)
    """What a stage said again: its transactions make that impossible."""
    built: Counter[str] = field(default_factory=Counter)
    """Trajectories by session."""
    trained: list[Trained] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Of the book, in its order."""
    digests: dict[str, set[str]] = field(default_factory=dict)
    """By batch id: of all that was ever handed over as this batch."""
    dead_letters: Counter[str] = field(default_factory=Counter)
    """By reason."""


async def gather(stack: Stack) -> Evidence:
    evidence = Evidence()
    async with Log.open(stack.settings) as log:
        async for record in log.read(COMPLETIONS):
            _take_completion(evidence, record)
        async for record in log.read(OUTCOMES):
            _take_outcome(evidence, record)
        async for record in log.read(BUILT):
            evidence.built[(record.key or b"").decode()] += 1
    letters = await read_letters(stack.settings)
    evidence.dead_letters.update(letter.info.reason for letter in letters.values())
    _read_book(stack, evidence)
    return evidence


def _take_outcome(evidence: Evidence, record: Any) -> None:
    said: TokenDisposition = decode(TokenDisposition, record.value, tuple(record.headers))
    if said.outcome_id in evidence.outcomes and said.stage in EXACTLY_ONCE:
        evidence.repeated.append(said)
    evidence.outcomes[said.outcome_id] = said


def _take_completion(evidence: Evidence, record: Any) -> None:
    try:
        event = decode(COMPLETIONS.model, record.value, tuple(record.headers))
    except PoisonRecordError:
        return  # it is among the dead letters
    if not isinstance(event, CompletionRecord):
        return
    for choice in event.choices:
        ids = [] if choice.token_ids is None else list(map(int, choice.token_ids))
        prompt = [] if event.prompt_ids is None else list(map(int, event.prompt_ids))
        evidence.captured[event.completion_id] = Captured(event.session_id, event.completion_id, prompt, ids)


def _read_book(stack: Stack, evidence: Evidence) -> None:
    directory = stack.trainer_directory
    for line in (directory / BOOK).read_bytes().splitlines():
        step = orjson.loads(line)
        evidence.steps.append(step["step"])
        evidence.trained += map(Trained.read, step["traces"])
    for line in (directory / SEEN).read_bytes().splitlines():
        seen = orjson.loads(line)
        if "batch_id" in seen:
            evidence.digests.setdefault(seen["batch_id"], set()).add(seen["digest"])
