"""Where a parent's reply ends inside a child's prompt, and whether the tokens up to there are that reply.

The exact case needs no search: the prompt goes on with the very ids that were sampled. Else the template's copy of
the reply was tokenised anew ("drift"). The copy reaches to the end-of-turn token; it counts as the same reply only if
no token was purely added or removed, and if a configured tokenizer decodes both to one text, or, without one, if the
child's messages carry the reply unchanged. In all other cases the child starts a trace of its own, because a joined
trace would put sampled tokens into a context that the policy never saw.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rollmill.strategies.decoding import Decode
from rollmill_builder.merging.chat_messages import ends_with_text, reasoning_of, reply_change
from rollmill_builder.merging.options import DriftRules
from rollmill_builder.merging.sampled_calls import Ids, SampledCall
from rollmill_builder.storage.call_parts import Message

NATURAL_FINISH_REASONS = frozenset({"stop", "tool_calls", "function_call"})
"""Finish reasons of a reply that the policy ended itself, by its end-of-turn token."""

GENERATION_PROMPT = 8
"""Tokens at the end of a prompt that may hold the opening of a turn, and what a template appends to it."""

REASONING_OPENING = 2
"""Leading tokens that a reply with reasoning and one without may have in common."""


class Alignment(NamedTuple):
    """The child continues its parent's trace: its prompt from token ``resume`` on is the context after the reply."""

    resume: int
    drift: int = 0
    """Sampled tokens that the prompt holds in another tokenisation; 0: the ids are the same."""
    scaffold: int = 0
    """Tokens at the end of the parent's prompt that the child's prompt does not hold any more."""

    @property
    def exact(self) -> bool:
        """Whether the child's trace holds its prompt, token by token, in front of its reply."""
        return not self.drift and not self.scaffold


@dataclass(frozen=True)
class Mismatch:
    """The child does not continue its parent: a reason code, and the first prompt position that differs."""

    reason: str
    at: int
    call: SampledCall | None = None
    """The call that it does not continue."""


class EndOfTurn:
    """The token that ends a turn: configured, or taken from the replies of the session, never guessed.

    A reply is evidence if the policy ended it (`NATURAL_FINISH_REASONS`) and no stop string did: then its last id, or
    the id that the engine reports as stop reason. All evidence for one finish reason has to agree.
    """

    def __init__(self, configured: int | None, calls: Iterable[SampledCall]) -> None:
        self._configured = configured
        self._seen: dict[tuple[str | None, str], set[int]] = {}
        for call in calls:
            if ended_by_token(call):
                self._seen.setdefault((call.record.fingerprint, str(call.choice.finish_reason)), set()).add(
                    _end_token(call)
                )

    def of(self, call: SampledCall) -> int | None:
        """The token that ends ``call`` in a later prompt; None where it is unknown."""
        if self._configured is not None:
            return self._configured
        model = call.record.fingerprint
        if ended_by_token(call):
            return _single(self._seen[model, str(call.choice.finish_reason)])
        return _single({item for (kind, _), items in self._seen.items() if kind == model for item in items})


def ended_by_token(call: SampledCall) -> bool:
    return call.choice.finish_reason in NATURAL_FINISH_REASONS and not isinstance(call.choice.stop_reason, str)


def _end_token(call: SampledCall) -> int:
    reported = call.choice.stop_reason
    return reported if isinstance(reported, int) else int(call.reply_ids[-1])


def _single(found: set[int]) -> int | None:
    return next(iter(found)) if len(found) == 1 else None


def exact_alignment(parent: SampledCall) -> Alignment:
    """Of a child's prompt that begins with the parent's prompt and the ids of its reply."""
    return Alignment(parent.tokens)


def align(parent: SampledCall, child: SampledCall, end: int | None, rules: DriftRules) -> Alignment | Mismatch:
    """The alignment where a child's prompt begins with its parent's, but goes on with other ids than its reply's.

    ``end`` is the end-of-turn token of the parent's reply, None where it is unknown.
    """
    start = parent.prompt_tokens
    tail = child.prompt_ids(start)
    equal = common_prefix(parent.reply_ids, tail)
    found = _find_copy(parent, tail, equal, end)
    if isinstance(found, str):
        return Mismatch(found, start + equal, parent)
    copy = tail[: found.stop]
    rest, other = _without_common_suffix(found.body[equal:], copy[equal:])
    reason = (
        _difference(rest, other, found.body, equal)
        or _content_change(parent, child, found.body, copy, equal, rules.decode)
        or _refused_drift(len(rest), rules)
    )
    return Alignment(start + found.resume, len(rest)) if reason is None else Mismatch(reason, start + equal, parent)


def align_after_prompt_suffix(
    parent: SampledCall, child: SampledCall, at: int, end: int | None, rules: DriftRules
) -> Alignment | Mismatch | None:
    """The alignment where a child's prompt leaves the parent's at ``at``, inside the parent's generation prompt.

    Templates end a generation prompt with an empty thinking block, or open one, and write neither into history. None:
    what follows is not the parent's reply.
    """
    tail, reply = child.prompt_ids(at), parent.reply_ids
    if common_prefix(reply, tail) == len(reply):
        merged = rules.on_scaffold == "merge"
        dropped = parent.prompt_tokens - at
        return Alignment(at + len(reply), scaffold=dropped) if merged else Mismatch("scaffold_removed", at, parent)
    if _is_end_of(reply, tail, end) or _reply_change(parent, child) == "reasoning_stripped":
        return Mismatch("reasoning_stripped", at, parent)
    return None


def _is_end_of(reply: Ids, tail: Ids, end: int | None) -> bool:
    """Whether ``tail`` begins with the last tokens of ``reply``, at least one beside its end of turn."""
    ends = np.flatnonzero(tail == (-1 if end is None else end))
    size = int(ends[0]) + 1 if len(ends) else 0
    return 1 < size < len(reply) and bool((reply[-size:] == tail[:size]).all())


@dataclass(frozen=True)
class _Copy:
    body: Ids
    """The reply without its end-of-turn token."""
    stop: int
    """Index of the copy's end-of-turn token, counted from the end of the parent's prompt."""
    resume: int


def _find_copy(parent: SampledCall, tail: Ids, equal: int, end: int | None) -> _Copy | str:
    """The extent of the template's copy in ``tail``; the ``equal`` first tokens are the reply's own.

    Else a reason code.
    """
    if isinstance(parent.choice.stop_reason, str):
        return "stop_string"
    if end is None:
        return "end_of_turn_unknown"
    sampled_end = int(parent.reply_ids[-1]) == end
    body = parent.reply_ids[:-1] if sampled_end else parent.reply_ids
    ends = np.flatnonzero(tail[equal:] == end)
    if not len(ends):
        return "no_end_of_turn"
    if (body[equal:] == end).any() or (ended_by_token(parent) and not sampled_end):
        return "end_of_turn_ambiguous"
    stop = equal + int(ends[0])
    if _crosses_turns(tail[equal:stop], body[equal:], _opening(parent), end):
        return "end_of_turn_missing"
    return _Copy(body, stop, stop + sampled_end)


def _opening(call: SampledCall) -> Ids:
    return call.prompt_ids(max(0, call.prompt_tokens - GENERATION_PROMPT))


def _crosses_turns(copy: Ids, rest: Ids, opening: Ids, end: int) -> bool:
    """Whether ``copy`` runs on into another turn, since the template wrote no end-of-turn token after the reply.

    Another turn begins like the parent's own: with tokens of the generation prompt, among ``opening``.
    """
    ends = np.flatnonzero(opening == end)
    opening = opening[ends[-1] + 1 :] if len(ends) else opening
    return any(np.count_nonzero(copy == token) > np.count_nonzero(rest == token) for token in set(opening.tolist()))


def _difference(rest: Ids, copy: Ids, body: Ids, equal: int) -> str | None:
    """Tokens only removed or only added change the text: another reply, whatever the messages contain."""
    if len(rest) and len(copy):
        return None
    if equal == 0 and len(rest) and len(rest) < len(body):
        return "reasoning_stripped"
    if equal == 0 and len(copy):
        return "scaffold_inserted"
    return "reply_differs"


def _content_change(
    parent: SampledCall, child: SampledCall, body: Ids, copy: Ids, equal: int, decode: Decode | None
) -> str | None:
    """Why the copy is not the same reply; None where it is. A configured tokenizer decides, else the messages do."""
    change = _reply_change(parent, child) or _rendered_change(parent, equal)
    if decode is None:
        return change
    if decode(body.tolist()) == decode(copy.tolist()):
        return None
    return "reply_differs" if change in {None, "reply_unverified"} else change


def _reply_change(parent: SampledCall, child: SampledCall) -> str | None:
    if parent.message is None:
        return "reply_unverified"
    later = child.messages_after(parent)
    if later is None:
        return "reply_unverified"
    return reply_change(parent.message, later[0]) if later else "reply_differs"


def _rendered_change(parent: SampledCall, equal: int) -> str | None:
    """What a template changes of a reply that the messages carry unchanged.

    Many leave reasoning out: then the copy does not begin as the reply did. All of them close a thinking block or a
    tool call that the length limit cut off.
    """
    reply: Message = parent.message or {}
    if reasoning_of(reply) and equal < REASONING_OPENING:
        return "reasoning_stripped"
    return "reply_unverified" if not ended_by_token(parent) and not ends_with_text(reply) else None


def _refused_drift(drift: int, rules: DriftRules) -> str | None:
    if rules.on_drift == "fork":
        return "drift"
    return "drift_over_n" if rules.on_drift == "fork_over_n" and drift > rules.max_drift_tokens else None


def common_prefix(left: Ids, right: Ids) -> int:
    """Number of equal leading tokens."""
    count = min(len(left), len(right))
    differing = np.flatnonzero(left[:count] != right[:count])
    return int(differing[0]) if len(differing) else count


def _without_common_suffix(left: Ids, right: Ids) -> tuple[Ids, Ids]:
    common = common_prefix(left[::-1], right[::-1])
    return left[: len(left) - common], right[: len(right) - common]
