"""Which acknowledged batches were taken back, because a trainer went back to a checkpoint (rule R3)."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from rollmill.codec import decode
from rollmill.errors import PoisonRecordError
from rollmill.models import Rewound, StepAcknowledged, StepsResharded, TrainerEvent
from rollmill.ops.ledger.log_reader import Log
from rollmill.topics import ACKS


@dataclass
class Lineage:
    """Folds the topic ``acks`` in its order."""

    _acknowledged: dict[tuple[str, int], dict[int, str]] = field(default_factory=dict)
    """By run and rank: batch ids by step."""
    _rewound: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By batch id and rank."""

    def take(self, event: TrainerEvent) -> None:
        if isinstance(event, StepAcknowledged):
            self._acknowledged.setdefault((event.run, event.rank), {})[event.step] = event.batch_id
        if isinstance(event, Rewound | StepsResharded):
            for (run, rank), batches in self._acknowledged.items():
                if run == event.run and (isinstance(event, StepsResharded) or event.rank in (None, rank)):
                    self._take_back(rank, batches, event.next_step)

    def _take_back(self, rank: int, batches: dict[int, str], next_step: int) -> None:
        for step in [step for step in batches if step >= next_step]:
            self._rewound[batches.pop(step), rank] += 1

    @property
    def rewound(self) -> dict[str, int]:
        """How often a batch was taken back, by its id. Of several ranks the one that did it most often counts."""
        most: dict[str, int] = {}
        for (batch_id, _), count in self._rewound.items():
            most[batch_id] = max(count, most.get(batch_id, 0))
        return most


async def read_rewound(log: Log) -> dict[str, int]:
    lineage = Lineage()
    async for record in log.read(ACKS):
        with suppress(PoisonRecordError):  # the batcher sets it aside
            lineage.take(decode(ACKS.model, record.value, tuple(record.headers)))
    return lineage.rewound
