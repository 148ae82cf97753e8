"""Counts every token: what the agents received must be captured, and each captured token must end exactly once. Pure.

It knows the scripted conversations only. What was trained is what the trainer's journal has, not what was reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from chaos.checks.observations import CapturedCall, Observations, TrainedTrace
from chaos.load.scripted_conversation import TURNS, ScriptedConversation
from chaos.load.workload import AgentObservations
from rollmill.models import Disposition, TokenDisposition

Counts = npt.NDArray[np.int64]
MAX_COMPLAINTS = 20


@dataclass
class Findings:
    """Numbers of tokens. Anything but 0 is a fault, except ``sessions``, ``tokens``, ``trained`` and ``excluded``."""

    sessions: int = 0
    tokens: int = 0
    """Captured."""
    trained: int = 0
    lost: int = 0
    """Received by an agent and not captured, or captured and without a disposition."""
    doubled: int = 0
    """With more than one disposition, or captured without a call."""
    altered: int = 0
    """Different from the engine's reply, or at another position."""
    unexplained: int = 0
    """Not trained, although nothing happened to the session's group that would explain it."""
    excluded: Counter[str] = field(default_factory=Counter)
    """By reason; allowed."""
    complaints: list[str] = field(default_factory=list)
    """The first few, as text."""

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.altered or self.unexplained or self.complaints)

    def complain(self, text: str) -> None:
        if len(self.complaints) < MAX_COMPLAINTS:
            self.complaints.append(text)


def check(agents: Mapping[str, AgentObservations], observations: Observations) -> Findings:
    """``agents``: by session, what its agent saw."""
    findings = Findings(sessions=len(agents))
    by_session: dict[str, list[CapturedCall]] = {}
    for completion in observations.captured.values():
        by_session.setdefault(completion.session_id, []).append(completion)
    for session_id in by_session.keys() - agents.keys():
        findings.complain(f"{session_id}: no agent had this session")
    for session_id, seen in agents.items():
        _check_capture(seen, by_session.get(session_id, []), findings)
    _check_repeats(observations, findings)
    _check_content(agents, observations.trained, findings)
    _check_dispositions(agents, observations, findings)
    _check_steps(observations, findings)
    return findings


def _check_capture(seen: AgentObservations, captured: Iterable[CapturedCall], findings: Findings) -> None:
    conversation, turns = seen.conversation, Counter[int]()
    for completion in captured:
        turn = conversation.turn_of(completion.prompt)
        if turn is None or completion.reply != conversation.reply_ids(turn):
            findings.altered += len(completion.reply)
            findings.complain(f"{completion.session_id}: {completion.completion_id} is not a call of the conversation")
        else:
            turns[turn] += 1
    for turn in range(TURNS):
        size = len(conversation.reply_ids(turn))
        received = int(turn < seen.answered)
        if turns[turn] < received:
            findings.lost += size
            findings.complain(f"{conversation.session_id}: turn {turn} was received and is not captured")
        if turns[turn] > received + seen.failures[turn]:
            findings.doubled += size
            findings.complain(f"{conversation.session_id}: turn {turn} is captured {turns[turn]} times")


def _check_repeats(observations: Observations, findings: Findings) -> None:
    for outcome in observations.repeated:
        findings.doubled += outcome.tokens
        findings.complain(f"{outcome.session_id}: {outcome.stage} reported {outcome.disposition.value} twice")
    sizes = Counter[str]()
    for completion in observations.captured.values():
        sizes[completion.session_id] += len(completion.reply)
    for session_id, times in observations.built.items():
        if times > 1:
            findings.doubled += (times - 1) * sizes[session_id]
            findings.complain(f"{session_id}: built {times} times")


def _check_content(
    agents: Mapping[str, AgentObservations], trained: Iterable[TrainedTrace], findings: Findings
) -> None:
    for trace in trained:
        agent = agents.get(trace.session_id)
        wrong = len(trace.ids) if agent is None else _wrong_tokens(agent.conversation, trace)
        if wrong:
            findings.altered += wrong
            findings.complain(f"{trace.session_id}: a trained trace differs from the conversation at {wrong} tokens")


def _wrong_tokens(conversation: ScriptedConversation, trace: TrainedTrace) -> int:
    """Tokens of a trained trace that the conversation does not have at that position, with that log-prob and mask."""
    turns = next((n for n in range(1, TURNS + 1) if len(conversation.sequence(n)) == len(trace.ids)), 0)
    if not turns or conversation.sequence(turns) != trace.ids or trace.reward != conversation.reward:
        return len(trace.ids)
    expected = {
        position: value
        for turn in range(turns)
        for position, value in zip(conversation.positions(turn), conversation.log_probs(turn), strict=True)
    }
    pairs = ((position, value) for position, value in enumerate(trace.log_probs) if trace.mask[position])
    wrong = sum(expected.get(position) != value for position, value in pairs)
    return wrong + abs(sum(trace.mask) - sum(stop - start for _, _, start, stop in trace.units))


def _check_dispositions(
    agents: Mapping[str, AgentObservations], observations: Observations, findings: Findings
) -> None:
    trained = _counts(observations, _trained_ranges(observations.trained), findings)
    untrained = {
        key: _counts(observations, ranges, findings)
        for key, ranges in _untrained_ranges(observations.outcomes.values())
    }
    undisturbed = _undisturbed(agents)
    for completion in observations.captured.values():
        counts = trained[completion.completion_id].copy()
        findings.trained += int((counts > 0).sum())
        for reason, by_completion in untrained.items():
            other = by_completion[completion.completion_id]
            counts += other
            findings.excluded[reason] += int(other.sum())
            if completion.session_id in undisturbed:
                findings.unexplained += int(other.sum())
        findings.tokens += len(counts)
        findings.lost += int((counts == 0).sum())
        findings.doubled += int((counts > 1).sum())
        if (counts != 1).any():
            findings.complain(
                f"{completion.session_id}: {completion.completion_id} has disposition counts {sorted(set(counts))}"
            )
    findings.excluded += Counter()  # without the zeros


def _undisturbed(agents: Mapping[str, AgentObservations]) -> set[str]:
    """Sessions in groups where no agent noticed anything."""
    harmed = {agent.conversation.group_id for agent in agents.values() if agent.failures or not agent.closed}
    return {session for session, agent in agents.items() if agent.conversation.group_id not in harmed}


TokenRanges = Iterable[tuple[str, int, int]]


def _trained_ranges(trained: Iterable[TrainedTrace]) -> Iterator[tuple[str, int, int]]:
    for trace in trained:
        for completion, _, start, stop in trace.units:
            yield completion, start, stop


def _untrained_ranges(outcomes: Iterable[TokenDisposition]) -> Iterator[tuple[str, TokenRanges]]:
    """Ranges by reason. What the trainer reports is left out: its journal counts."""
    reasons: dict[str, list[tuple[str, int, int]]] = {}
    for outcome in outcomes:
        if outcome.disposition in {Disposition.EXCLUDED, Disposition.DEAD_LETTERED}:
            reason = outcome.reason or "unknown"
            outcome_ranges = ((unit.completion_id, unit.start, unit.stop) for unit in outcome.units)
            reasons.setdefault(reason, []).extend(outcome_ranges)
    yield from reasons.items()


def _counts(observations: Observations, ranges: TokenRanges, findings: Findings) -> dict[str, Counts]:
    """By completion, how often each of its tokens is in ``ranges``."""
    counts = {key: np.zeros(len(call.reply), np.int64) for key, call in observations.captured.items()}
    for completion, start, stop in ranges:
        if completion not in counts or stop > len(counts[completion]):
            findings.altered += stop - start
            findings.complain(f"{completion}: {start} to {stop} has a disposition and was never captured")
        else:
            counts[completion][start:stop] += 1
    return counts


def _check_steps(observations: Observations, findings: Findings) -> None:
    if observations.steps != list(range(len(observations.steps))):
        findings.complain(f"the trainer's lineage is not step after step: {observations.steps}")
    for batch, digests in observations.digests.items():
        if len(digests) > 1:
            findings.complain(f"batch {batch} was handed over in {len(digests)} versions")
