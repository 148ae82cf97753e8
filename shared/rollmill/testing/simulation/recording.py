"""The record that capture would write of a call: with missing fields, failures and odd times, by probability."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.models import (
    CallKind,
    CallStatus,
    CompletionRecord,
    PolicySpan,
    PolicyVersion,
    SampledChoice,
    VersionRun,
)
from rollmill.testing.samples.sessions import Message, choice, completion
from rollmill.testing.simulation.engine import SampledReply
from rollmill.testing.simulation.probabilities import Probabilities
from rollmill.testing.simulation.rng import chance

NO_LOGPROB = -9999.0
FAILURES = (CallStatus.ERROR, CallStatus.INCOMPLETE, CallStatus.CLIENT_GONE)


@dataclass(frozen=True)
class CallContext:
    """What a record takes from the world. ``number``: of the call, from 0; ``version``: of the policy."""

    session_id: str
    number: int
    version: PolicyVersion
    probabilities: Probabilities


def record_of(
    call: CallContext,
    prompt: list[int],
    messages: Sequence[Message] | None,
    tools: Sequence[Message],
    replies: Sequence[SampledReply],
    rng: random.Random,
) -> CompletionRecord:
    """The record of one call."""
    probabilities, number = call.probabilities, call.number
    status = rng.choice(FAILURES) if chance(rng, probabilities.fails) else CallStatus.OK
    choices = [_choice(reply, index, call.version, probabilities, rng) for index, reply in enumerate(replies)]
    if status is CallStatus.ERROR and chance(rng, 0.5):
        choices = []
    known = not chance(rng, probabilities.loses) and messages is not None
    record = completion(
        f"c{number:03d}",
        None if chance(rng, probabilities.loses) else prompt,
        choices or None,
        at=_time(number, probabilities, rng),
        session_id=call.session_id,
        messages=list(messages or ()) if known else None,
        tools=list(tools) or None if known else None,
        kind=CallKind.AUX if chance(rng, probabilities.aux) else CallKind.AGENT,
        status=status,
        policy=_policy(call.version, choices, probabilities, rng),
        usage_completion_tokens=_usage(replies, rng),
        fingerprint=rng.choice(("m1", None)) if chance(rng, probabilities.loses) else "m1",
    )
    return record if choices else record.model_copy(update={"choices": ()})


def _choice(
    reply: SampledReply, index: int, version: PolicyVersion, probabilities: Probabilities, rng: random.Random
) -> SampledChoice:
    ids = None if chance(rng, probabilities.loses) else reply.ids
    more: dict[str, Any] = {} if reply.stop is None else {"stop_reason": reply.stop}
    if chance(rng, probabilities.loses):
        more |= {"trainable": False, "untrainable_reason": "ids_differ_from_usage: by one"}
    if ids and len(ids) > 1 and chance(rng, probabilities.bumps):
        at = rng.randint(1, len(ids) - 1)
        later = PolicyVersion(version.epoch, version.version + 1)
        more["versions"] = (VersionRun(version, at), VersionRun(later, len(ids) - at))
    message = None if chance(rng, probabilities.loses) else reply.message
    logprobs = _logprobs(ids, probabilities, rng)
    return choice(ids, index=index, logprobs=logprobs, finish=reply.finish, message=message, **more)


def _logprobs(ids: Sequence[int] | None, probabilities: Probabilities, rng: random.Random) -> list[float] | None:
    if ids is None or chance(rng, probabilities.loses):
        return None
    found = [-round(rng.random() * 8, 3) for _ in ids]
    if found and chance(rng, probabilities.loses):
        found[rng.randrange(len(found))] = NO_LOGPROB
    return found


def _policy(
    version: PolicyVersion, choices: Sequence[SampledChoice], probabilities: Probabilities, rng: random.Random
) -> PolicySpan:
    after = max([version, *(run.version for item in choices for run in item.versions or () if run.version)])
    return PolicySpan(
        name="other" if chance(rng, probabilities.other_policy) else "policy", before=version, after=after
    )


def _time(number: int, probabilities: Probabilities, rng: random.Random) -> float:
    if chance(rng, probabilities.odd_clock):
        return rng.choice((0.0, 100.0, 100.0 + rng.randint(0, number + 3)))
    return 101.0 + number


def _usage(replies: Sequence[SampledReply], rng: random.Random) -> int | None:
    return None if chance(rng, 0.2) else sum(len(reply.ids) for reply in replies)
