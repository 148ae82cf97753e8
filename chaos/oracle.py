"""Counts every token: what the agents heard must be captured, and what is captured must come to exactly one end. Pure.

It knows the dialogues alone. What was trained is what the trainer wrote down, not what anybody reported of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from chaos.agents import Seen
from chaos.dialogue import TURNS, Dialogue
from chaos.evidence import Captured, Evidence, Trained
from rollmill.models import Disposition, TokenDisposition

Counts = npt.NDArray[np.int64]
LONGEST_LIST = 20


@dataclass
class Findings:
    """Numbers of tokens. Anything but 0 is a fault, ``tokens`` and ``trained`` apart."""

    sessions: int = 0
    tokens: int = 0
    """Captured."""
    trained: int = 0
    lost: int = 0
    """Heard by an agent and not captured, or captured and without an end."""
    doubled: int = 0
    """With more than one end, or captured without anybody having called."""
    altered: int = 0
    """Other than the engine said them, or at another place."""
    unexplained: int = 0
    """Not trained, although nothing happened to the session that allows for it."""
    excluded: Counter[str] = field(default_factory=Counter)
    """By reason; allowed."""
    complaints: list[str] = field(default_factory=list)
    """The first few, in words."""

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.altered or self.unexplained or self.complaints)

    def complain(self, words: str) -> None:
        if len(self.complaints) < LONGEST_LIST:
            self.complaints.append(words)


def judge(seen: Mapping[str, Seen], evidence: Evidence) -> Findings:
    """``seen``: by session, what its agent knows of it."""
    findings = Findings(sessions=len(seen))
    by_session: dict[str, list[Captured]] = {}
    for completion in evidence.captured.values():
        by_session.setdefault(completion.session_id, []).append(completion)
    for session_id in by_session.keys() - seen.keys():
        findings.complain(f"{session_id}: no agent knows it")
    for session_id, one in seen.items():
        _judge_capture(one, by_session.get(session_id, []), findings)
    _judge_repeats(evidence, findings)
    _judge_content(seen, evidence.trained, findings)
    _judge_ends(seen, evidence, findings)
    _judge_steps(evidence, findings)
    return findings


def _judge_capture(seen: Seen, captured: Iterable[Captured], findings: Findings) -> None:
    dialogue, turns = seen.dialogue, Counter[int]()
    for completion in captured:
        turn = dialogue.turn_of(completion.prompt)
        if turn is None or completion.reply != dialogue.reply_ids(turn):
            findings.altered += len(completion.reply)
            findings.complain(f"{completion.session_id}: {completion.completion_id} is no call of the dialogue")
        else:
            turns[turn] += 1
    for turn in range(TURNS):
        size = len(dialogue.reply_ids(turn))
        heard = int(turn < seen.answered)
        if turns[turn] < heard:
            findings.lost += size
            findings.complain(f"{dialogue.session_id}: turn {turn} was heard and is not captured")
        if turns[turn] > heard + seen.failures[turn]:
            findings.doubled += size
            findings.complain(f"{dialogue.session_id}: turn {turn} is captured {turns[turn]} times")


def _judge_repeats(evidence: Evidence, findings: Findings) -> None:
    for said in evidence.repeated:
        findings.doubled += said.tokens
        findings.complain(f"{said.session_id}: {said.stage} said {said.disposition.value} of it twice")
    sizes = Counter[str]()
    for completion in evidence.captured.values():
        sizes[completion.session_id] += len(completion.reply)
    for session_id, times in evidence.built.items():
        if times > 1:
            findings.doubled += (times - 1) * sizes[session_id]
            findings.complain(f"{session_id}: built {times} times")


def _judge_content(seen: Mapping[str, Seen], trained: Iterable[Trained], findings: Findings) -> None:
    for trace in trained:
        one = seen.get(trace.session_id)
        wrong = len(trace.ids) if one is None else _wrong_tokens(one.dialogue, trace)
        if wrong:
            findings.altered += wrong
            findings.complain(f"{trace.session_id}: a trained trace differs from the dialogue at {wrong} tokens")


def _wrong_tokens(dialogue: Dialogue, trace: Trained) -> int:
    """Tokens of a trained trace that the dialogue does not have at that place, with that log-prob, to be trained."""
    turns = next((n for n in range(1, TURNS + 1) if len(dialogue.sequence(n)) == len(trace.ids)), 0)
    if not turns or dialogue.sequence(turns) != trace.ids or trace.reward != dialogue.reward:
        return len(trace.ids)
    expected = {
        place: value
        for turn in range(turns)
        for place, value in zip(dialogue.places(turn), dialogue.log_probs(turn), strict=True)
    }
    pairs = ((place, value) for place, value in enumerate(trace.log_probs) if trace.mask[place])
    wrong = sum(expected.get(place) != value for place, value in pairs)
    return wrong + abs(sum(trace.mask) - sum(stop - start for _, _, start, stop in trace.units))


def _judge_ends(seen: Mapping[str, Seen], evidence: Evidence, findings: Findings) -> None:
    trained = _ends(evidence, _trained_units(evidence.trained), findings)
    closed = {key: _ends(evidence, units, findings) for key, units in _closed_units(evidence.outcomes.values())}
    clean = _clean(seen)
    for completion in evidence.captured.values():
        counts = trained[completion.completion_id].copy()
        findings.trained += int((counts > 0).sum())
        for reason, units in closed.items():
            other = units[completion.completion_id]
            counts += other
            findings.excluded[reason] += int(other.sum())
            if completion.session_id in clean:
                findings.unexplained += int(other.sum())
        findings.tokens += len(counts)
        findings.lost += int((counts == 0).sum())
        findings.doubled += int((counts > 1).sum())
        if (counts != 1).any():
            findings.complain(f"{completion.session_id}: {completion.completion_id} has ends {sorted(set(counts))}")
    findings.excluded += Counter()  # without the zeros


def _clean(seen: Mapping[str, Seen]) -> set[str]:
    """Sessions to whose whole group nothing happened that an agent could notice."""
    harmed = {one.dialogue.group_id for one in seen.values() if one.failures or not one.closed}
    return {session for session, one in seen.items() if one.dialogue.group_id not in harmed}


Units = Iterable[tuple[str, int, int]]


def _trained_units(trained: Iterable[Trained]) -> Iterator[tuple[str, int, int]]:
    for trace in trained:
        for completion, _, start, stop in trace.units:
            yield completion, start, stop


def _closed_units(outcomes: Iterable[TokenDisposition]) -> Iterator[tuple[str, Units]]:
    """Ranges by reason; what a trainer reports is left out: its book counts."""
    reasons: dict[str, list[tuple[str, int, int]]] = {}
    for said in outcomes:
        if said.disposition in {Disposition.EXCLUDED, Disposition.DEAD_LETTERED}:
            reason = said.reason or "unknown"
            ranges = ((unit.completion_id, unit.start, unit.stop) for unit in said.units)
            reasons.setdefault(reason, []).extend(ranges)
    yield from reasons.items()


def _ends(evidence: Evidence, units: Units, findings: Findings) -> dict[str, Counts]:
    """By completion, how often each of its tokens is in ``units``."""
    counts = {key: np.zeros(len(one.reply), np.int64) for key, one in evidence.captured.items()}
    for completion, start, stop in units:
        if completion not in counts or stop > len(counts[completion]):
            findings.altered += stop - start
            findings.complain(f"{completion}: {start} to {stop} has an end and was never captured")
        else:
            counts[completion][start:stop] += 1
    return counts


def _judge_steps(evidence: Evidence, findings: Findings) -> None:
    if evidence.steps != list(range(len(evidence.steps))):
        findings.complain(f"the trainer's lineage is not step after step: {evidence.steps}")
    for batch, digests in evidence.digests.items():
        if len(digests) > 1:
            findings.complain(f"batch {batch} was handed over in {len(digests)} versions")
