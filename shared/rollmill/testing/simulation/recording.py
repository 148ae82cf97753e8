"""What capture writes of a call: not always everything, and not always on time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
from rollmill.testing.simulation.engine import Reply
from rollmill.testing.simulation.probabilities import Probabilities
from rollmill.testing.simulation.rng import chance

if TYPE_CHECKING:
    from rollmill.testing.simulation.world import World

NO_LOGPROB = -9999.0
FAILURES = (CallStatus.ERROR, CallStatus.INCOMPLETE, CallStatus.CLIENT_GONE)


def record_of(
    world: World,
    prompt: list[int],
    messages: Sequence[Message] | None,
    tools: Sequence[Message],
    replies: Sequence[Reply],
    rng: random.Random,
) -> CompletionRecord:
    """The record of one call."""
    habits, number = world.habits, len(world.records)
    status = rng.choice(FAILURES) if chance(rng, habits.fails) else CallStatus.OK
    choices = [_choice(reply, index, world.version, habits, rng) for index, reply in enumerate(replies)]
    if status is CallStatus.ERROR and chance(rng, 0.5):
        choices = []
    known = not chance(rng, habits.loses) and messages is not None
    record = completion(
        f"c{number:03d}",
        None if chance(rng, habits.loses) else prompt,
        choices or None,
        at=_time(number, habits, rng),
        session_id=world.session_id,
        messages=list(messages or ()) if known else None,
        tools=list(tools) or None if known else None,
        kind=CallKind.AUX if chance(rng, habits.aux) else CallKind.AGENT,
        status=status,
        policy=_policy(world.version, choices, habits, rng),
        usage_completion_tokens=_usage(replies, rng),
        fingerprint=rng.choice(("m1", None)) if chance(rng, habits.loses) else "m1",
    )
    return record if choices else record.model_copy(update={"choices": ()})


def _choice(
    reply: Reply, index: int, version: PolicyVersion, habits: Probabilities, rng: random.Random
) -> SampledChoice:
    ids = None if chance(rng, habits.loses) else reply.ids
    more: dict[str, Any] = {} if reply.stop is None else {"stop_reason": reply.stop}
    if chance(rng, habits.loses):
        more |= {"trainable": False, "untrainable_reason": "ids_differ_from_usage: by one"}
    if ids and len(ids) > 1 and chance(rng, habits.bumps):
        at = rng.randint(1, len(ids) - 1)
        later = PolicyVersion(version.epoch, version.version + 1)
        more["versions"] = (VersionRun(version, at), VersionRun(later, len(ids) - at))
    message = None if chance(rng, habits.loses) else reply.message
    logprobs = _logprobs(ids, habits, rng)
    return choice(ids, index=index, logprobs=logprobs, finish=reply.finish, message=message, **more)


def _logprobs(ids: Sequence[int] | None, habits: Probabilities, rng: random.Random) -> list[float] | None:
    if ids is None or chance(rng, habits.loses):
        return None
    found = [-round(rng.random() * 8, 3) for _ in ids]
    if found and chance(rng, habits.loses):
        found[rng.randrange(len(found))] = NO_LOGPROB
    return found


def _policy(
    version: PolicyVersion, choices: Sequence[SampledChoice], habits: Probabilities, rng: random.Random
) -> PolicySpan:
    after = max([version, *(run.version for item in choices for run in item.versions or () if run.version)])
    return PolicySpan(name="other" if chance(rng, habits.other_policy) else "policy", before=version, after=after)


def _time(number: int, habits: Probabilities, rng: random.Random) -> float:
    if chance(rng, habits.odd_clock):
        return rng.choice((0.0, 100.0, 100.0 + rng.randint(0, number + 3)))
    return 101.0 + number


def _usage(replies: Sequence[Reply], rng: random.Random) -> int | None:
    return None if chance(rng, 0.2) else sum(len(reply.ids) for reply in replies)
