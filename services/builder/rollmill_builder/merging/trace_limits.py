"""The most tokens a trace may have, and what becomes of a longer one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from rollmill_builder.merging.branches import Branch
from rollmill_builder.merging.options import check_choice, check_count
from rollmill_builder.merging.parent_search import Link
from rollmill_builder.merging.sampled_calls import Call

OverLong = Literal["cut", "split", "exclude"]

REASON = "over_long"


@dataclass(frozen=True)
class TraceLimit:
    """``most``: tokens of a trace, prompt and response; None: no limit. ``policy``, for a longer one:

    ``cut`` keeps the turns that fit. ``split`` keeps all: the next turns go on in a further trace, whose prompt is the
    end of the prompt as served, half the limit at most; its replies are trained in less context than they were
    sampled in, so its metadata says how many tokens were dropped. ``exclude`` keeps none. What is not kept is
    excluded(``over_long``), as is, under ``split``, a reply that fits into no trace by itself.
    """

    most: int | None = None
    policy: OverLong = "cut"

    @classmethod
    def checked(cls, most: int | None, policy: OverLong) -> TraceLimit:
        """A limit from a config. Raises ValueError."""
        check_choice("over_long", policy, get_args(OverLong))
        if most is not None:
            check_count("max_trace_tokens", most, least=2)
        return cls(most, policy)

    def apply(self, branches: Iterable[Branch]) -> tuple[tuple[Branch, ...], tuple[Call, ...]]:
        """The branches within the limit, and the calls that are left out of them."""
        kept: list[Branch] = []
        left: list[Call] = []
        for branch in branches:
            pieces, out = self._applied(branch)
            kept += pieces
            left += out
        return tuple(kept), tuple(left)

    def _applied(self, branch: Branch) -> tuple[Sequence[Branch], Sequence[Call]]:
        count = len(branch.calls)
        fits = count if self.most is None else _turns_within(branch, 0, branch.first.tokens, self.most)
        if fits == count:
            return (branch,), ()
        if self.policy == "split" and self.most is not None:
            return _split(branch, self.most)
        if self.policy == "exclude" or not fits:
            return (), branch.calls
        return (replace(_piece(branch, 0, fits), left_out=count - fits),), branch.calls[fits:]


def _turns_within(branch: Branch, start: int, size: int, most: int) -> int:
    """The first turn, from ``start`` on, that does not fit; ``size``: tokens up to the end of turn ``start``."""
    for place in range(start, len(branch.calls)):
        if place > start:
            call = branch.calls[place]
            size += call.tokens - branch.splices[place - 1].resume
        if size > most:
            return place
    return len(branch.calls)


def _split(branch: Branch, most: int) -> tuple[list[Branch], list[Call]]:
    pieces: list[Branch] = []
    left: list[Call] = []
    start = 0
    while start < len(branch.calls):
        call = branch.calls[start]
        reply = len(call.reply_ids)
        whole = not start and call.tokens <= most
        prompt = call.prompt_tokens if whole else min(call.prompt_tokens, most // 2, most - reply)
        if prompt < 1:
            left.append(call)
            start += 1
            continue
        stop = _turns_within(branch, start, prompt + reply, most)
        pieces.append(replace(_piece(branch, start, stop), dropped=call.prompt_tokens - prompt))
        start = stop
    return pieces, left


def _piece(branch: Branch, start: int, stop: int) -> Branch:
    """Turns ``start`` to ``stop`` of a branch."""
    calls, splices = branch.calls[start:stop], branch.splices[start : stop - 1]
    if not start:
        return replace(branch, calls=calls, splices=splices)
    return Branch(calls, splices, Link(branch.calls[start - 1]), REASON)
