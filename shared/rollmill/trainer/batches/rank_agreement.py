"""Where all ranks of a trainer go on together: at the step that the rank furthest behind needs (rule R3).

A job that dies between the acknowledgements of two ranks leaves their committed positions apart. Ranks that went on
from there would compute the gradients of one update on different steps.
"""

from __future__ import annotations

import logging

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from rollmill.errors import ConfigurationError, PoisonRecordError
from rollmill.models import BatchHeader, StepsResharded
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.trainer.batches.rank_assignment import RankAssignment
from rollmill.trainer.batches.state import StreamState, rank_group, read_committed
from rollmill.trainer.layouts.safetensors_reader import read_batch

_log = logging.getLogger(__name__)

POLL_MS = 200
FIRST_WINDOW = 64
"""Offsets that are read back first for a step's beginning; each further attempt reads four times as many."""


async def agreed_state(
    clients: KafkaClients, topic: str, assignment: RankAssignment, own: StreamState, layout: StepsResharded | None
) -> StreamState | None:
    """Where a rank has to go back to; None: it is not ahead of any other.

    ``own``: what the rank of ``assignment`` has committed. ``layout``: the newest, which makes positions of older ones
    void; None: no steps were ever returned. Raises ConfigurationError where the log does not hold the steps any more.
    """
    steps = await _next_steps(clients, topic, assignment, own, layout)
    if (step := min(steps.values())) == own.next_step:
        return None
    found = await _gone_back(clients, topic, own, step)
    behind = [rank for rank, other in sorted(steps.items()) if other == step]
    _log.warning(
        "rank %d had acknowledged steps %d to %d, and ranks %s had not: the steps come again",
        *(assignment.rank, step, own.next_step - 1, behind),
    )
    return found


async def _next_steps(
    clients: KafkaClients, topic: str, assignment: RankAssignment, own: StreamState, layout: StepsResharded | None
) -> dict[int, int]:
    """By rank the step that follows its last acknowledged one."""
    found = {assignment.rank: own.next_step}
    for rank in range(assignment.ranks):
        if rank != assignment.rank:
            committed = await read_committed(clients, rank_group(clients.settings, rank), topic)
            other = next_step_of(committed, RankAssignment(rank, assignment.ranks, own.world_size), own.run, layout)
            found |= {} if other is None else {rank: other}
    return found


def next_step_of(
    committed: StreamState | None, assignment: RankAssignment, run: str, layout: StepsResharded | None
) -> int | None:
    """The next step of a rank by what it has committed; None where its own state will refuse it when it opens."""
    begin = 0 if layout is None else layout.next_step
    if committed is None or (layout is not None and committed.placement < layout.placement):
        return begin
    if committed.run != run or set(committed.offsets) != set(map(str, assignment.partitions)):
        return None
    return committed.next_step


async def _gone_back(clients: KafkaClients, topic: str, state: StreamState, step: int) -> StreamState:
    """``state`` at an earlier step. Raises ConfigurationError where the log does not hold that step any more."""
    offsets = {}
    async with clients.reading(reset="earliest") as consumer:
        for number, offset in state.offsets.items():
            partition = TopicPartition(topic, int(number))
            found = await _beginning(consumer, partition, offset, step, state.placement)
            if found is None:
                raise ConfigurationError(
                    f"another rank has acknowledged only the steps before step {step}, this one those before step "
                    f"{state.next_step}, and {topic}/{number} does not hold step {step} any more: load a checkpoint "
                    "(load_state_dict)"
                )
            offsets[number] = found
    return state.replace(next_step=step, offsets=offsets)


async def _beginning(
    consumer: AIOKafkaConsumer, partition: TopicPartition, end: int, step: int, placement: int
) -> int | None:
    """Offset of a step's first record below ``end``; None: it is not in the log."""
    consumer.assign([partition])
    first = (await consumer.beginning_offsets([partition]))[partition]
    window = FIRST_WINDOW
    while True:
        start = max(first, end - window)
        consumer.seek(partition, start)
        found, passed_earlier = await _search(consumer, partition, end, step, placement)
        if found is not None or passed_earlier or start == first:
            return found
        window *= 4


async def _search(
    consumer: AIOKafkaConsumer, partition: TopicPartition, end: int, step: int, placement: int
) -> tuple[int | None, bool]:
    """Offset of the step's first record from the position on, and whether there was a record of an earlier step."""
    passed_earlier = False
    while await consumer.position(partition) < end:
        polled = await consumer.getmany(timeout_ms=POLL_MS)
        for record in polled.get(partition, ()):
            header = _header(record)
            if record.offset >= end or header is None or header.placement != placement:
                continue
            if (header.step, header.micro_batch) == (step, 0):
                return record.offset, passed_earlier
            passed_earlier |= header.step < step
    return None, passed_earlier


def _header(record: ConsumerRecord[bytes, bytes]) -> BatchHeader | None:
    """None for an unreadable record: reading on from before it will say so."""
    try:
        return read_batch(record.value or b"").header
    except PoisonRecordError:
        return None
