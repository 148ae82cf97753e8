"""Copies to a device: what is begun when, and that nothing changes on the way."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from rollmill.errors import ConfigurationError
from rollmill.settings import KafkaSettings
from rollmill.testing.samples.batches import SampleTrace, step_values
from rollmill.trainer import BatchStream, MicroBatch
from rollmill.trainer.batches.staleness_filter import filter_step
from rollmill.trainer.batches.step import Step
from rollmill.trainer.batches.step_assembly import StepRecords
from rollmill.trainer.dataset import StepDataset
from rollmill.trainer.device import on_device, overlapped
from rollmill.trainer.layouts.safetensors_reader import read_batch


def a_step(micro_batches: int = 4) -> Step:
    values = step_values(0, [[[SampleTrace(f"s{n}", reply=(n, 7, 8))] for n in range(micro_batches)]])
    records = StepRecords(tuple(map(read_batch, values[0])), {0: micro_batches})
    return Step(records, filter_step(records.header, records.header.policy_version, {}), lambda _: None)


def test_without_cuda_batches_pass_as_they_are() -> None:
    before = [batch.input_ids.tolist() for batch in a_step()]
    assert [batch.input_ids.tolist() for batch in on_device(a_step(), "cpu")] == before
    rows = (batch.padded() for batch in a_step())
    assert [batch.input_ids.shape for batch in on_device(rows, torch.device("cpu"))] == [(1, 5)] * 4
    assert [batch.input_ids.device.type for batch in on_device(a_step(), "meta")] == ["meta"] * 4


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_copies_are_begun_ahead_and_no_further(ahead: int) -> None:
    events: list[str] = []

    def asked() -> Iterator[MicroBatch]:
        for number, batch in enumerate(a_step()):
            events.append(f"asked {number}")
            yield batch

    def begin(batch: MicroBatch) -> Callable[[], MicroBatch]:
        return lambda: batch

    handed = []
    for number, batch in enumerate(overlapped(asked(), begin, ahead)):
        events.append(f"handed {number}")
        handed.append(batch.input_ids.tolist())
    assert handed == [batch.input_ids.tolist() for batch in a_step()]
    for number in range(4):
        asked_before = events[: events.index(f"handed {number}")]
        assert sum(event.startswith("asked") for event in asked_before) == min(4, number + 1 + ahead)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_the_same_values_arrive() -> None:
    for moved, batch in zip(on_device(a_step(), "cuda"), a_step(), strict=True):
        assert moved.input_ids.is_cuda
        assert all(torch.equal(one.cpu(), other) for one, other in zip(moved.tensors(), batch.tensors(), strict=True))


def test_a_micro_batch_knows_its_tensors() -> None:
    (batch,) = a_step(1)
    assert batch.nbytes == sum(tensor.nbytes for tensor in batch.tensors())
    assert len(list(batch.tensors())) == 16


@pytest.fixture
def dataset() -> Iterator[StepDataset]:
    settings = KafkaSettings(bootstrap_servers="127.0.0.1:1")
    with BatchStream(settings=settings) as stream:
        yield StepDataset(stream, lambda: (0, 0), until=lambda: True)


def test_worker_processes_are_refused_with_the_way_out(dataset: StepDataset) -> None:
    with pytest.raises(ConfigurationError, match="num_workers=0"):
        pickle.dumps(dataset)
    loader: DataLoader[Step] = DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn", timeout=60
    )
    with pytest.raises(ConfigurationError, match="num_workers=0"):
        next(iter(loader))
