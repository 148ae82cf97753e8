"""A batch stream as a torch dataset. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from rollmill.errors import ConfigurationError
from rollmill.trainer.batches.step import Step
from rollmill.trainer.batches.stream import BatchStream

_WHY = (
    "a BatchStream cannot be shared with worker processes: each would take the rank over from the others and see its "
    "own steps; use DataLoader(dataset, batch_size=None, num_workers=0), the stream reads ahead by itself"
)


class StepDataset(IterableDataset[Step]):
    """Steps, one item each; acknowledge each after its optimizer step.

    ``DataLoader(dataset, batch_size=None)`` passes them on unchanged. `state_dict` and `load_state_dict` are
    those of the stream, so that a stateful data loader's checkpoint resumes at the first step not acknowledged.
    Iterating with worker processes raises ConfigurationError.
    """

    def __init__(
        self, stream: BatchStream, version: Callable[[], tuple[int, int]], until: Callable[[], bool] | None = None
    ) -> None:
        """``version`` and ``until`` as in `BatchStream.steps`."""
        self._stream = stream
        self._version = version
        self._until = until

    def __iter__(self) -> Iterator[Step]:
        if get_worker_info() is not None:
            raise ConfigurationError(_WHY)
        return self._stream.steps(self._version, until=self._until)

    def __reduce__(self) -> NoReturn:
        raise ConfigurationError(_WHY)

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state)
