"""Folds outcomes and tokens in flight into a balance, token range by token range (rules L1, L3, L4). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from rollmill.models import Disposition, Manifest, PolicyVersion, TokenDisposition, TokenRange
from rollmill.ops.ledger.balance import Balance, Totals, bucket_of

T = TypeVar("T")


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
            entry = Entry(outcome.disposition, unit.version, outcome.reason, outcome.batch_id, self.booked)
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
        self, in_flight: Iterable[Manifest] = (), rewound: Mapping[str, int] = NEVER, *, until: int | None = None
    ) -> Balance:
        """The balance, given the manifests of what is in flight: records, state and steps not acknowledged.

        ``rewound``: how often trainers took back a batch that they had acknowledged. So many of its outcomes are void:
        the lineage of the loaded checkpoint counts (rule R3). ``until``: tokens captured by a later outcome than
        that many are not balanced yet, for they were not captured when the tokens in flight were read.
        """
        manifests = _by_reply(in_flight)
        found = [
            (reply, history)
            for reply, ranges in self._replies.items()
            for history in _histories(_with_in_flight(ranges, manifests.get(reply, ())), rewound, until)
        ]
        lengths = _lengths(found)
        balance = Balance(sessions=Counter(bucket_of(tokens) for tokens in lengths.values()))
        for reply, history in found:
            _count_history(balance.of(history.version, bucket_of(lengths[reply.session_id, reply.attempt])), history)
        return balance

    def _range(self, session_id: str, attempt: int, unit: TokenRange) -> Ranges[Mark]:
        reply = Reply(session_id, attempt, unit.completion_id, unit.choice)
        return self._replies.setdefault(reply, Ranges())


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


@dataclass(frozen=True)
class Segment(Generic[T]):
    """Tokens ``start`` to ``stop`` (exclusive), which all of ``marks`` cover, in the order in which they were set."""

    start: int
    stop: int
    marks: tuple[T, ...]

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass
class Ranges(Generic[T]):
    """Marks on ranges; `segments` yields the pieces within which every mark holds or none does."""

    _marks: list[tuple[int, int, T]] = field(default_factory=list)

    def mark(self, start: int, stop: int, mark: T) -> None:
        if start < stop:
            self._marks.append((start, stop, mark))

    def copy(self) -> Ranges[T]:
        return Ranges(list(self._marks))

    def segments(self) -> Iterator[Segment[T]]:
        edges = _edges(self._marks)
        for start, stop in pairwise(edges):
            marks = tuple(mark for low, high, mark in self._marks if low <= start and stop <= high)
            if marks:
                yield Segment(start, stop, marks)


def _edges(marks: Iterable[tuple[int, int, object]]) -> list[int]:
    return sorted({edge for start, stop, _ in marks for edge in (start, stop)})
