"""Folds outcomes and holdings into a balance, token range by token range (rules L1, L3, L4). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from rollmill.models import Disposition, Manifest, PolicyVersion, TokenDisposition, TokenRange
from rollmill.ops.ledger.balance import Balance, Totals, bucket_of
from rollmill.ops.ledger.ranges import Ranges


class Reply(NamedTuple):
    """One sampled reply: the account that its tokens are booked in."""

    session_id: str
    attempt: int
    completion_id: str
    choice: int


class Entry(NamedTuple):
    """One outcome's word on a range."""

    disposition: Disposition
    version: PolicyVersion
    reason: str | None = None
    batch_id: str | None = None
    """Of the trainer's words."""
    number: int = 0
    """Counts the outcomes in the order of booking."""


class History(NamedTuple):
    """What was said of tokens that share one fate, in order, and whether something holds them."""

    tokens: int
    entries: tuple[Entry, ...]
    held: bool

    @property
    def captures(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.disposition is Disposition.CAPTURED)

    @property
    def version(self) -> PolicyVersion:
        return (self.captures or self.entries)[0].version


HELD = None
NEVER: Mapping[str, int] = MappingProxyType({})
Mark = Entry | None

_REPEATABLE = {Disposition.TRAINED, Disposition.EXCLUDED, Disposition.DEAD_LETTERED}
"""The same outcome id again is the same word again: a trainer that went back to a checkpoint acknowledges twice."""


@dataclass
class Reconciliation:
    """Books outcomes in the order of their partition; `balance` may be asked again and again.

    An outcome of one reply always comes from the same partition (the key is the session id), so the order between
    partitions does not matter.
    """

    _replies: dict[Reply, Ranges[Mark]] = field(default_factory=dict)
    _said: dict[str, dict[object, str]] = field(default_factory=dict)
    """Ids of dispositions by session and by what they are of, since the session's last reopening."""
    booked: int = 0
    """Outcomes taken so far, repeats included."""

    def book(self, outcome: TokenDisposition) -> None:
        """Book one outcome."""
        self.booked += 1
        if self._is_repeat(outcome):
            return
        for unit in outcome.units:
            entry = Entry(outcome.disposition, unit.version, outcome.reason, outcome.batch_id, self.booked)
            self._range(outcome.session_id, outcome.attempt, unit).lay(unit.start, unit.stop, entry)

    def _is_repeat(self, outcome: TokenDisposition) -> bool:
        if outcome.disposition is Disposition.REOPENED:
            self._said.pop(outcome.session_id, None)
        if outcome.disposition not in _REPEATABLE:
            return False
        said = self._said.setdefault(outcome.session_id, {})
        # A trainer that went back may come to another word on a batch, and later to its first one again.
        of = outcome.outcome_id if outcome.batch_id is None else (outcome.attempt, outcome.units, outcome.batch_id)
        repeat = said.get(of) == outcome.outcome_id
        said[of] = outcome.outcome_id
        return repeat

    def balance(
        self, held: Iterable[Manifest] = (), rewound: Mapping[str, int] = NEVER, *, until: int | None = None
    ) -> Balance:
        """The balance, given what is held: manifests of records, of state and of steps not acknowledged.

        ``rewound``: how often trainers took back a batch that they had acknowledged. So many of its words are void:
        the lineage of the loaded checkpoint counts (rule R3). ``until``: tokens captured by a later outcome than
        that many are not balanced yet, for they were not there when the holdings were read.
        """
        holdings = _holdings(held)
        found = [
            (reply, history)
            for reply, ranges in self._replies.items()
            for history in _histories(_with_holdings(ranges, holdings.get(reply, ())), rewound, until)
        ]
        lengths = _lengths(found)
        balance = Balance(sessions=Counter(bucket_of(tokens) for tokens in lengths.values()))
        for reply, history in found:
            _settle(balance.of(history.version, bucket_of(lengths[reply.session_id, reply.attempt])), history)
        return balance

    def _range(self, session_id: str, attempt: int, unit: TokenRange) -> Ranges[Mark]:
        reply = Reply(session_id, attempt, unit.completion_id, unit.choice)
        return self._replies.setdefault(reply, Ranges())


def _holdings(held: Iterable[Manifest]) -> dict[Reply, list[TokenRange]]:
    holdings: dict[Reply, list[TokenRange]] = {}
    for manifest in held:
        for unit in manifest.units:
            reply = Reply(manifest.session_id, manifest.attempt, unit.completion_id, unit.choice)
            holdings.setdefault(reply, []).append(unit)
    return holdings


def _with_holdings(ranges: Ranges[Mark], units: Iterable[TokenRange]) -> Ranges[Mark]:
    both = ranges.copy()
    for unit in units:
        both.lay(unit.start, unit.stop, HELD)
    return both


def _histories(ranges: Ranges[Mark], rewound: Mapping[str, int], until: int | None) -> Iterator[History]:
    """The pieces of one reply within which all tokens have the same history; later captures left out."""
    for segment in ranges.segments():
        entries = _standing([mark for mark in segment.marks if mark is not HELD], rewound)
        history = History(segment.tokens, tuple(entries), HELD in segment.marks)
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


def _settle(counted_in: Iterable[Totals], history: History) -> None:
    """Count tokens that all have the same history."""
    fate, captures = _fate(history.entries), history.captures
    for totals in counted_in:
        if not captures:
            totals.uncaptured += history.tokens
            continue
        totals.captured += history.tokens
        _count(totals, fate, history.tokens, held=history.held)
        if len(captures) > 1 or _open_dispositions(history.entries) > 1:
            totals.doubled += history.tokens


def _standing(entries: list[Entry], rewound: Mapping[str, int]) -> list[Entry]:
    """Without the words on a batch that were taken back: the first ones, and never the last."""
    if not rewound:
        return entries
    words = Counter(entry.batch_id for entry in entries if entry.batch_id in rewound)
    void = {batch_id: min(rewound[batch_id], count - 1) for batch_id, count in words.items() if batch_id}
    standing = []
    for entry in entries:
        if entry.batch_id is not None and void.get(entry.batch_id, 0):
            void[entry.batch_id] -= 1
        else:
            standing.append(entry)
    return standing


def _fate(entries: Iterable[Entry]) -> Entry | None:
    """The disposition in force: the last one, unless it was reopened."""
    fate: Entry | None = None
    for entry in entries:
        if entry.disposition is Disposition.REOPENED:
            fate = None
        elif entry.disposition is not Disposition.CAPTURED:
            fate = entry
    return fate


def _open_dispositions(entries: Iterable[Entry]) -> int:
    """The largest number of dispositions in force at once; each reopening takes one back."""
    open_now = most = 0
    for entry in entries:
        if entry.disposition is Disposition.REOPENED:
            open_now = max(0, open_now - 1)
        elif entry.disposition is not Disposition.CAPTURED:
            open_now += 1
        most = max(most, open_now)
    return most


def _count(totals: Totals, fate: Entry | None, tokens: int, *, held: bool) -> None:
    if fate is None:
        totals.pending += tokens if held else 0
        totals.lost += 0 if held else tokens
    elif fate.disposition is Disposition.TRAINED:
        totals.trained += tokens
    elif fate.disposition is Disposition.EXCLUDED:
        totals.excluded[fate.reason or "unknown"] += tokens
    else:
        totals.dead_lettered[fate.reason or "unknown"] += tokens
