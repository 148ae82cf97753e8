"""Folds outcomes and tokens in flight into a balance, token range by token range (rules L1, L3, L4). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from rollmill.models import Disposition, Manifest, PolicyVersion, TokenDisposition, TokenRange
from rollmill.ops.ledger.balance import Balance, Totals, bucket_of
from rollmill.ops.ledger.token_ranges import Ranges
from rollmill.ops.ledger.unread_calls import UnreadCall


class Reply(NamedTuple):
    """One sampled reply: its tokens are accounted for together."""

    session_id: str
    attempt: int
    completion_id: str
    choice: int


class Entry(NamedTuple):
    """One outcome of a token range."""

    disposition: Disposition
    version: PolicyVersion
    reason: str | None = None
    batch_id: str | None = None
    """Of the trainer's outcomes."""
    number: int = 0
    """Counts the outcomes in the order of booking."""
    at: float = 0.0
    """Time of the outcome's cause, in seconds since the epoch; 0.0: unknown."""


class History(NamedTuple):
    """The outcomes of tokens that share one fate, in order, and whether they are in flight."""

    tokens: int
    entries: tuple[Entry, ...]
    in_flight: bool

    @property
    def captures(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.disposition is Disposition.CAPTURED)

    @property
    def version(self) -> PolicyVersion:
        return (self.captures or self.entries)[0].version

    @property
    def pending(self) -> bool:
        return bool(self.captures) and self.in_flight and _fate(self.entries) is None


IN_FLIGHT = None
NEVER: Mapping[str, int] = MappingProxyType({})
Mark = Entry | None

_REPEATABLE = {Disposition.TRAINED, Disposition.EXCLUDED, Disposition.DEAD_LETTERED}
"""A repeated outcome id repeats the outcome: a trainer that went back to a checkpoint acknowledges twice."""


@dataclass
class Reconciliation:
    """Books outcomes in the order of their partition; `balance` may be asked again and again.

    An outcome of one reply always comes from the same partition (the key is the session id), so the order between
    partitions does not matter.
    """

    _replies: dict[Reply, Ranges[Mark]] = field(default_factory=dict)
    _last_ids: dict[str, dict[object, str]] = field(default_factory=dict)
    """Last outcome id by session and by subject (batch or outcome), since the session's last reopening."""
    booked: int = 0
    """Outcomes taken so far, repeats included."""

    def book(self, outcome: TokenDisposition) -> None:
        """Book one outcome."""
        self.booked += 1
        if self._is_repeat(outcome):
            return
        for unit in outcome.units:
            entry = Entry(outcome.disposition, unit.version, outcome.reason, outcome.batch_id, self.booked, outcome.at)
            self._range(outcome.session_id, outcome.attempt, unit).mark(unit.start, unit.stop, entry)

    def _is_repeat(self, outcome: TokenDisposition) -> bool:
        if outcome.disposition is Disposition.REOPENED:
            self._last_ids.pop(outcome.session_id, None)
        if outcome.disposition not in _REPEATABLE:
            return False
        last_ids = self._last_ids.setdefault(outcome.session_id, {})
        # A trainer that went back may decide otherwise about a batch, and later as at first again.
        subject = outcome.outcome_id if outcome.batch_id is None else (outcome.attempt, outcome.units, outcome.batch_id)
        repeat = last_ids.get(subject) == outcome.outcome_id
        last_ids[subject] = outcome.outcome_id
        return repeat

    def balance(
        self,
        in_flight: Iterable[Manifest] = (),
        rewound: Mapping[str, int] = NEVER,
        *,
        until: int | None = None,
        unread: Iterable[UnreadCall] = (),
    ) -> Balance:
        """The balance, given the manifests of what is in flight: records, state and steps not acknowledged.

        ``rewound``: how often trainers took back a batch that they had acknowledged. So many of its outcomes are void:
        the lineage of the loaded checkpoint counts (rule R3). ``until``: tokens captured by a later outcome than
        that many are not balanced yet, for they were not captured when the tokens in flight were read. ``unread``:
        calls that the builder had not accepted then; those that wait come before those that were refused.
        """
        manifests = _by_reply(in_flight)
        replies = {**self._replies, **self._not_accepted(unread, until)}
        found = [
            (reply, history)
            for reply, ranges in replies.items()
            for history in _histories(_with_in_flight(ranges, manifests.get(reply, ())), rewound, until)
        ]
        lengths = _lengths(found)
        balance = Balance(sessions=Counter(bucket_of(tokens) for tokens in lengths.values()))
        for reply, history in found:
            _count_history(balance.of(history.version, bucket_of(lengths[reply.session_id, reply.attempt])), history)
            if history.pending:
                balance.wait(reply.session_id, reply.attempt, history.tokens, history.captures[0].at)
        return balance

    def _not_accepted(self, calls: Iterable[UnreadCall], until: int | None) -> dict[Reply, Ranges[Mark]]:
        """Replies without a capture up to ``until``, as if they were captured: of each the first call counts."""
        first: dict[Reply, UnreadCall] = {}
        found: dict[Reply, Ranges[Mark]] = {}
        for call in calls:
            for unit in call.units:
                reply = Reply(call.session_id, call.attempt, unit.completion_id, unit.choice)
                captured = self._captured_at(reply)
                if first.setdefault(reply, call) is not call or _is_balanced(captured, until):
                    continue
                waits = call.refused is None or captured is not None
                for mark in _as_captured(unit, call, waits=waits):
                    found.setdefault(reply, Ranges()).mark(unit.start, unit.stop, mark)
        return found

    def _captured_at(self, reply: Reply) -> int | None:
        """Number of the outcome that captured it first; None: nothing of it was captured."""
        ranges = self._replies.get(reply)
        marks = () if ranges is None else ranges.marks()
        numbers = (mark.number for mark in marks if mark is not None and mark.disposition is Disposition.CAPTURED)
        return min(numbers, default=None)

    def _range(self, session_id: str, attempt: int, unit: TokenRange) -> Ranges[Mark]:
        reply = Reply(session_id, attempt, unit.completion_id, unit.choice)
        return self._replies.setdefault(reply, Ranges())


def _is_balanced(captured: int | None, until: int | None) -> bool:
    """Whether the outcome that captured a reply is one of those that the balance is of."""
    return captured is not None and (until is None or captured <= until)


def _as_captured(unit: TokenRange, call: UnreadCall, *, waits: bool) -> tuple[Mark, ...]:
    capture = Entry(Disposition.CAPTURED, unit.version, at=call.at)
    if waits:
        return capture, IN_FLIGHT
    return capture, Entry(Disposition.DEAD_LETTERED, unit.version, call.refused, at=call.at)


def _by_reply(in_flight: Iterable[Manifest]) -> dict[Reply, list[TokenRange]]:
    found: dict[Reply, list[TokenRange]] = {}
    for manifest in in_flight:
        for unit in manifest.units:
            reply = Reply(manifest.session_id, manifest.attempt, unit.completion_id, unit.choice)
            found.setdefault(reply, []).append(unit)
    return found


def _with_in_flight(ranges: Ranges[Mark], units: Iterable[TokenRange]) -> Ranges[Mark]:
    both = ranges.copy()
    for unit in units:
        both.mark(unit.start, unit.stop, IN_FLIGHT)
    return both


def _histories(ranges: Ranges[Mark], rewound: Mapping[str, int], until: int | None) -> Iterator[History]:
    """The pieces of one reply within which all tokens have the same history; later captures left out."""
    for segment in ranges.segments():
        entries = _without_rewound([mark for mark in segment.marks if mark is not IN_FLIGHT], rewound)
        history = History(segment.tokens, tuple(entries), IN_FLIGHT in segment.marks)
        captures = history.captures
        if entries and not (until is not None and captures and captures[0].number > until):
            yield history


def _lengths(found: Iterable[tuple[Reply, History]]) -> Counter[tuple[str, int]]:
    """Captured tokens by session and attempt."""
    lengths: Counter[tuple[str, int]] = Counter()
    for reply, history in found:
        if history.captures:
            lengths[reply.session_id, reply.attempt] += history.tokens
    return lengths


def _count_history(counted_in: Iterable[Totals], history: History) -> None:
    """Count tokens that all have the same history."""
    fate, captures = _fate(history.entries), history.captures
    for totals in counted_in:
        if not captures:
            totals.uncaptured += history.tokens
            continue
        totals.captured += history.tokens
        _count(totals, fate, history.tokens, in_flight=history.in_flight)
        if len(captures) > 1 or _open_dispositions(history.entries) > 1:
            totals.doubled += history.tokens


def _without_rewound(entries: list[Entry], rewound: Mapping[str, int]) -> list[Entry]:
    """Without the outcomes of a batch that were taken back: the first ones, and never the last."""
    if not rewound:
        return entries
    outcomes = Counter(entry.batch_id for entry in entries if entry.batch_id in rewound)
    void = {batch_id: min(rewound[batch_id], count - 1) for batch_id, count in outcomes.items() if batch_id}
    valid = []
    for entry in entries:
        if entry.batch_id is not None and void.get(entry.batch_id, 0):
            void[entry.batch_id] -= 1
        else:
            valid.append(entry)
    return valid


def _fate(entries: Iterable[Entry]) -> Entry | None:
    """The valid disposition: the last one, unless it was reopened."""
    fate: Entry | None = None
    for entry in entries:
        if entry.disposition is Disposition.REOPENED:
            fate = None
        elif entry.disposition is not Disposition.CAPTURED:
            fate = entry
    return fate


def _open_dispositions(entries: Iterable[Entry]) -> int:
    """The largest number of dispositions valid at once; each reopening takes one back."""
    open_now = most = 0
    for entry in entries:
        if entry.disposition is Disposition.REOPENED:
            open_now = max(0, open_now - 1)
        elif entry.disposition is not Disposition.CAPTURED:
            open_now += 1
        most = max(most, open_now)
    return most


def _count(totals: Totals, fate: Entry | None, tokens: int, *, in_flight: bool) -> None:
    if fate is None:
        totals.pending += tokens if in_flight else 0
        totals.lost += 0 if in_flight else tokens
    elif fate.disposition is Disposition.TRAINED:
        totals.trained += tokens
    elif fate.disposition is Disposition.EXCLUDED:
        totals.excluded[fate.reason or "unknown"] += tokens
    else:
        totals.dead_lettered[fate.reason or "unknown"] += tokens
