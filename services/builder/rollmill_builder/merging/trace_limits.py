"""The most tokens that a trace may have, and what is done with a longer one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from rollmill_builder.merging.branches import Branch
from rollmill_builder.merging.options import OverLong, check_choice, check_count
from rollmill_builder.merging.parent_search import ParentLink
from rollmill_builder.merging.sampled_calls import SampledCall

REASON = "over_long"


@dataclass(frozen=True)
class TraceLimit:
    """``max_tokens``: tokens of a trace, prompt and response; None: no limit. ``policy``, for a longer one:

    ``cut`` keeps the turns that fit. ``split`` keeps all: the next turns go on in a further trace. Its prompt is
    the end of the prompt as served, half the limit at most; its replies are trained in less context than they were
    sampled in, so its metadata tells how many tokens were dropped. ``exclude`` keeps none. What is not kept is
    excluded(``over_long``), as is, under ``split``, a reply that fits into no trace by itself.
    """

    max_tokens: int | None = None
    policy: OverLong = "cut"

    @classmethod
    def checked(cls, max_tokens: int | None, policy: OverLong) -> TraceLimit:
        """A limit from a config. Raises ValueError."""
        check_choice("over_long", policy, get_args(OverLong))
        if max_tokens is not None:
            check_count("max_trace_tokens", max_tokens, least=2)
        return cls(max_tokens, policy)

    def apply(self, branches: Iterable[Branch]) -> tuple[tuple[Branch, ...], tuple[SampledCall, ...]]:
        """The branches within the limit, and the calls that are left out of them."""
        kept: list[Branch] = []
        omitted: list[SampledCall] = []
        for branch in branches:
            pieces, rest = self._applied(branch)
            kept += pieces
            omitted += rest
        return tuple(kept), tuple(omitted)

    def _applied(self, branch: Branch) -> tuple[Sequence[Branch], Sequence[SampledCall]]:
        count = len(branch.calls)
        fits = count if self.max_tokens is None else _turns_within(branch, 0, branch.first.tokens, self.max_tokens)
        if fits == count:
            return (branch,), ()
        if self.policy == "split" and self.max_tokens is not None:
            return _split(branch, self.max_tokens)
        if self.policy == "exclude" or not fits:
            return (), branch.calls
        return (replace(_piece(branch, 0, fits), omitted_replies=count - fits),), branch.calls[fits:]


def _turns_within(branch: Branch, start: int, size: int, max_tokens: int) -> int:
    """The first turn, from ``start`` on, that does not fit; ``size``: tokens up to the end of turn ``start``."""
    for turn in range(start, len(branch.calls)):
        if turn > start:
            call = branch.calls[turn]
            size += call.tokens - branch.alignments[turn - 1].resume
        if size > max_tokens:
            return turn
    return len(branch.calls)


def _split(branch: Branch, max_tokens: int) -> tuple[list[Branch], list[SampledCall]]:
    pieces: list[Branch] = []
    omitted: list[SampledCall] = []
    start = 0
    while start < len(branch.calls):
        call = branch.calls[start]
        reply = len(call.reply_ids)
        whole = not start and call.tokens <= max_tokens
        prompt = call.prompt_tokens if whole else min(call.prompt_tokens, max_tokens // 2, max_tokens - reply)
        if prompt < 1:
            omitted.append(call)
            start += 1
            continue
        stop = _turns_within(branch, start, prompt + reply, max_tokens)
        pieces.append(replace(_piece(branch, start, stop), dropped_tokens=call.prompt_tokens - prompt))
        start = stop
    return pieces, omitted


def _piece(branch: Branch, start: int, stop: int) -> Branch:
    """Turns ``start`` to ``stop`` of a branch."""
    calls, alignments = branch.calls[start:stop], branch.alignments[start : stop - 1]
    if not start:
        return replace(branch, calls=calls, alignments=alignments)
    return Branch(calls, alignments, ParentLink(branch.calls[start - 1]), REASON)
