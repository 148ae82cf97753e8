"""The eval sessions of a prefix, read from ``trajectories``."""

from __future__ import annotations

from rollmill.codec import decode
from rollmill.errors import PoisonRecordError
from rollmill.ops.ledger.log_reader import Log
from rollmill.ops.ledger.pass_at_k import Answer, answer_of
from rollmill.settings import KafkaSettings
from rollmill.topics import TRAJECTORIES


async def read_evals(settings: KafkaSettings) -> dict[str, Answer]:
    """Every eval session that the topic still holds, by its id: the last attempt at its last revision."""
    found: dict[str, Answer] = {}
    async with Log.open(settings) as log:
        async for record in log.read(TRAJECTORIES):
            try:
                trajectory = decode(TRAJECTORIES.model, record.value, tuple(record.headers))
            except PoisonRecordError:
                continue  # the batcher has put it among the dead letters
            answer = answer_of(trajectory)
            known = found.get(trajectory.session_id)
            if answer is not None and (known is None or known.place < answer.place):
                found[trajectory.session_id] = answer
    return found
