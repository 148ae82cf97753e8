"""Records of every topic as seeds, mutations of them, and what a reader or a stage may make of them."""

from __future__ import annotations

import json
import random
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack

from rollmill.codec import CONTENT_TYPE, JSON, MSGPACK, SAFETENSORS, Headers, decode, encode
from rollmill.errors import PoisonRecordError
from rollmill.models import Record
from rollmill.testing.samples.trajectories import sample_trajectory
from rollmill.testing.simulation.probabilities import PROFILES
from rollmill.testing.simulation.world import World, world_of
from rollmill.topics import BUILT, COMPLETIONS, REGISTRY, TRAJECTORIES, Topic
from tests.fuzz.mutation import FRAGMENTS, Mutator, dump_json

EXAMPLES = Path(__file__).parents[2] / "schemas" / "examples"
CPU_SECONDS = 1.0
"""Of this process, for one record: independent of what else the machine does."""
TYPES = (JSON, MSGPACK)


class SlowError(BaseException):
    """A record took too long. No Exception, so that a stage's own handlers do not take it for a builder's failure."""


@contextmanager
def limited_time() -> Iterator[None]:
    """Raises SlowError inside the block once it has used up its processor time."""

    def stop(*_: object) -> None:
        raise SlowError(f"more than {CPU_SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def fault_of(work: Callable[[], object]) -> str | None:
    """What is raised by ``work`` beside PoisonRecordError, and where; None: nothing is, in time."""
    try:
        with limited_time():
            work()
    except PoisonRecordError:
        return None
    except (Exception, SlowError) as error:  # noqa: BLE001  # whatever is raised is the finding
        frame = traceback.extract_tb(error.__traceback__)
        frames = [each for each in frame if "rollmill" in each.filename and "fuzz" not in each.filename] or frame
        where = f"{Path(frames[-1].filename).name}:{frames[-1].name}"
        return f"{type(error).__name__} in {where}: {str(error)[:200]}"
    return None


MESSAGEPACK_DEPTH = 300
"""Of trees that are packed: the packer itself stops at 511, and Python's stack has to hold two calls per level."""


def some_world(rng: random.Random, session_id: str) -> World:
    steps = [rng.getrandbits(20) for _ in range(rng.randint(1, 5))]
    return world_of(steps, PROFILES[rng.choice(sorted(PROFILES))], session_id=session_id, seed=rng.randrange(1024))


def seeds(topic: Topic) -> list[Record]:
    """Valid records of a topic: those of ``schemas/examples`` that its model reads, and simulated ones."""
    found: list[Record] = []
    for path in sorted(EXAMPLES.glob("*.json")):
        try:
            found.append(decode(topic.model, path.read_bytes(), content_type(JSON)))
        except PoisonRecordError:
            continue
    if topic is COMPLETIONS:
        found += some_world(random.Random(1), "s1").records  # noqa: S311  # a simulation, no secret
    if topic in (BUILT, TRAJECTORIES):
        found += [sample_trajectory("s1"), sample_trajectory("s2", None)]
    return found


DECODED: tuple[Topic, ...] = tuple(topic for topic in REGISTRY if topic.model is not None)


def content_type(name: str) -> Headers:
    return ((CONTENT_TYPE, name.encode()),)


def tree_of(record: Record, form: str) -> Any:
    """The record as JSON or MessagePack has it: dictionaries, lists and scalars."""
    raw = encode(record, form)
    return json.loads(raw) if form == JSON else msgpack.unpackb(raw, raw=False, strict_map_key=False)


def pack_tree(tree: Any, form: str) -> bytes:
    """Bytes of any tree; integers that MessagePack has no form for become text."""
    if form == JSON:
        return dump_json(tree)
    raw: bytes = msgpack.packb(_within_range(tree), use_bin_type=True)
    return raw


def mutated(record: Record, mutator: Mutator) -> tuple[bytes, Headers]:
    """A record's value and headers after a change of its structure or its bytes; seldom, bytes of no structure."""
    form = mutator.rng.choice(TYPES)
    raw = pack_tree(mutator.mutate(tree_of(record, form)), form)
    if mutator.chance(0.2):
        raw = mutator.damage(raw)
    if mutator.chance(0.03):
        raw = mutator.rng.choice((mutator.rng.randbytes(mutator.rng.randrange(40)), *FRAGMENTS))
    return raw, _headers(form, mutator)


def _headers(form: str, mutator: Mutator) -> Headers:
    if mutator.chance(0.9):
        return content_type(form)
    return mutator.rng.choice(((), content_type(SAFETENSORS), ((CONTENT_TYPE, b"\xff;"),), content_type(MSGPACK)))


def session_of_bytes(value: bytes, headers: Headers, topic: Topic) -> str:
    """The session id that a value names, for its key; of what cannot be read, any."""
    try:
        record = decode(topic.model, value, headers)
    except Exception:  # noqa: BLE001  # a reader's faults are found when the record is fed
        return "s1"
    return str(getattr(record, "session_id", "s1"))


def unreadable_outputs(records: Sequence[Any]) -> list[str]:
    """Outputs of a stage that the readers of their topic would refuse."""
    faults = []
    for item in records:
        if item.value is None or item.topic.model is None or item.topic.format == SAFETENSORS:
            continue
        value = item.value if isinstance(item.value, bytes) else encode(item.value, item.topic.format)
        headers = item.headers or content_type(item.topic.format)
        fault = fault_of(lambda value=value, item=item, headers=headers: _readable(item.topic, value, headers))  # type: ignore[misc]  # a lambda with defaults
        faults += [] if fault is None else [f"output to {item.topic.name}: {fault}"]
    return faults


def _readable(topic: Topic, value: bytes, headers: Headers) -> None:
    try:
        decode(topic.model, value, headers)
    except PoisonRecordError as error:
        raise ValueError(f"refused by its own reader: {error}") from error


def _within_range(tree: Any, depth: int = 0) -> Any:
    if depth > MESSAGEPACK_DEPTH:
        return None
    if isinstance(tree, dict):
        return {key: _within_range(item, depth + 1) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_within_range(item, depth + 1) for item in tree]
    return str(tree) if isinstance(tree, int) and not -(2**63) <= tree < 2**64 else tree
